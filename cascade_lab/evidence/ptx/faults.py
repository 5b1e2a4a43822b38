"""What executed code must not do, one exception class per rule, so that a test can say which rule caught a bug.

Every fault names the kernel, the instruction and the line of the Triton source it was compiled from. None of these
stops a real GPU reliably: there most of them give a right answer now and then, and the rest a wrong one silently.
"""

from __future__ import annotations


class Fault(RuntimeError):
    """Compiled code broke a rule. Attributes: `kernel`, `line` (of the Triton source) and `instruction` (PTX)."""

    def __init__(self, message: str, kernel: str = "?", line: str = "?", instruction: str = "") -> None:
        super().__init__(f"{kernel}, {line}: {message}" + (f" in `{instruction}`" if instruction else ""))
        self.kernel, self.line, self.instruction = kernel, line, instruction


class OutOfBounds(Fault):
    """An access outside the storage of every tensor of the launch, or outside the program's shared memory."""


class NeverRead(Fault):
    """A read of memory that was declared as never read."""


class Misaligned(Fault):
    """An address that is no multiple of the width of the access."""


class Race(Fault):
    """Shared memory touched by two threads, or by a thread and a copy or product under way, and nothing between."""


class Divergence(Fault):
    """A barrier reached by a part of its program, or a warp-wide instruction by a part of its warp."""


class InFlight(Fault):
    """A register of an asynchronous matrix product used before the wait, or changed before it without a fence."""


class Endless(Fault):
    """More basic blocks executed than any kernel here needs: a loop that does not end."""


class Unsupported(NotImplementedError):
    """PTX that is not modelled: an opcode, a modifier or an operand. It is never guessed at."""

"""How tensors get from rank to rank, and what happens when a rank is lost: torch.distributed's messages in few calls.

A rank that dies or fails must not leave the others waiting. NCCL tells every rank of a group by itself. gloo, which
carries CPU tensors, has two habits that this module works around. It tells only those who wait for the lost rank, so in
a ring, or between two steps of a merge, the others would wait until their time is over; but it closes all connections
of a group as soon as one wait is over time, and whoever is at the other end hears that at once. `_hang_up` therefore
waits a millisecond for a message that nobody sends. And gloo's own all-gather is a ring of W - 1 dependent steps, so
`swap` starts all pairs at once. What is sent, and what it means, is decided in `distributed`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

try:
    from torch.distributed.distributed_c10d import _resolve_process_group
except ImportError as error:
    raise ImportError("cascade_lab.distributed needs a torch that is built with torch.distributed") from error

# of messages that nobody sends; gloo picks one of its devices by tag modulo their number, here that of tag 0
_UNUSED_TAG = 720720

# torch 2.13 renamed it and warns about the old name
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def group_of_name(name: str) -> dist.ProcessGroup:
    """The group that operators of a graph know by its name."""
    return _resolve_process_group(name)


def place(group) -> tuple[int, int]:
    """(rank in the group, number of ranks)."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("group: expected a process group, but torch.distributed.init_process_group was not called")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: expected one that this rank belongs to, given another")
    return rank, dist.get_world_size(group)


def device_of(group) -> torch.device:
    """Where a tensor lies that the group can send: the CPU if it can, else this rank's GPU."""
    on_cpu = "nccl" not in _backends(group) or "gloo" in _backends(group)
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def _backends(group) -> str:
    """Device and backend names, as "cpu:gloo,cuda:nccl"; a group made without a name has no other."""
    return str(dist.get_backend_config(group))


def swap(leaving: Iterable[Sequence[Tensor]], arriving: Iterable[Sequence[Tensor]], group, where: str) -> None:
    """Send the tensors leaving[r] to rank r and fill arriving[r] with what it sends here; all pairs start at once."""
    leaving, arriving = list(leaving), list(arriving)
    rank, W = place(group)
    order = [((rank - step) % W, (rank + step) % W) for step in range(1, W)]
    peers = dist.get_process_group_ranks(group)
    moves = []
    for source, target in order:
        moves += [dist.P2POp(dist.irecv, x, peers[source], group) for x in arriving[source] if x.numel()]
        moves += [dist.P2POp(dist.isend, x, peers[target], group) for x in leaving[target] if x.numel()]
    with losses_named(where, group):
        works = dist.batch_isend_irecv(moves) if moves else []
    for mine, kept in zip(arriving[rank], leaving[rank], strict=True):
        mine.copy_(kept)
    with losses_named(where, group):
        for work in works:
            work.wait()


def pass_on(tensors: Sequence[Tensor], taken: Sequence[Tensor], group, where: str) -> Callable[[], None]:
    """Start to send `tensors` to the next rank and to fill `taken` from the one before; call to wait for both."""
    rank, W = place(group)
    follower, leader = (dist.get_global_rank(group or dist.group.WORLD, r % W) for r in (rank + 1, rank - 1))
    moves = [dist.P2POp(dist.isend, x, follower, group) for x in tensors if len(x)]
    moves += [dist.P2POp(dist.irecv, x, leader, group) for x in taken if len(x)]
    with losses_named(where, group):
        works = dist.batch_isend_irecv(moves) if moves else []

    def wait() -> None:
        with losses_named(where, group):
            for work in works:
                work.wait()

    return wait


def all_reduce(x: Tensor, group, where: str, op: dist.ReduceOp = dist.ReduceOp.SUM) -> None:
    """The sum of all ranks' x, or what else `op` makes of them, in place."""
    with losses_named(where, group):
        dist.all_reduce(x, op, group=group)


def all_gather(x: Tensor, group, where: str) -> Tensor:
    """x `[...]` of all ranks, of one shape on each, as `[W, ...]`."""
    parts = x.new_empty((dist.get_world_size(group), *x.shape))
    with losses_named(where, group):
        _all_gather_flat(parts.view(-1), x.view(-1), group=group)
    return parts


def gather_rows(rows: np.ndarray, group, where: str) -> np.ndarray:
    """`[n, k]` int64 rows of all ranks, n different on each, one below the other."""
    device = device_of(group)
    counts = all_gather(torch.tensor([len(rows)], device=device), group, where).flatten().tolist()
    padded = torch.zeros((max(counts), rows.shape[1]), dtype=torch.int64, device=device)
    padded[: len(rows)] = torch.from_numpy(rows).to(device)
    parts = all_gather(padded, group, where).cpu().numpy() if len(padded) else [rows] * len(counts)
    return np.concatenate([part[:count] for part, count in zip(parts, counts, strict=True)])


@contextlib.contextmanager
def losses_named(where: str, group) -> Iterator[None]:
    """Say in one line that a rank was lost, whatever the transport calls it."""
    try:
        yield
    except RuntimeError as error:
        rank, world_size = place(group)
        # without the place in gloo's source and its advice
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].split("] ", 1)[-1].split(". ")[0]
        _hang_up(group)
        raise RuntimeError(
            f"{where}: rank {rank} of {world_size} lost another rank, or waited too long for it: {reason}"
        ) from error


@contextlib.contextmanager
def others_released(group) -> Iterator[None]:
    """If this rank fails between two messages, for whatever reason, nobody goes on waiting for the second."""
    try:
        yield
    except BaseException:
        _hang_up(group)
        raise


def _hang_up(group) -> None:
    """Close this rank's connections of a group that lost a rank, so that those who wait for this one end too."""
    if "gloo" not in _backends(group):
        return
    rank, world_size = place(group)
    for peer in (r for r in range(world_size) if r != rank):
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, device="cpu")
            dist.irecv(nothing, group=group, tag=_UNUSED_TAG, group_src=peer).wait(timedelta(milliseconds=1))

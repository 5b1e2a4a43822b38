"""The executor, instruction by instruction: known answers, and what each check lets pass and what not.

Expected numbers come from Python's integers and from the layouts as the PTX manual prints them, lane by lane.
"""

import functools
import math
import operator
import struct

import numpy as np
import pytest

from cascade_lab.evidence.ptx import (
    Divergence,
    Endless,
    InFlight,
    Misaligned,
    NeverRead,
    OutOfBounds,
    Race,
    Unsupported,
)
from cascade_lab.evidence.ptx import run as runs
from cascade_lab.evidence.ptx.memory import GlobalMemory, forbid
from cascade_lab.evidence.ptx.parse import parse
from cascade_lab.evidence.ptx.translate import Translation, label

HEAD = """
.visible .entry k(
\t.param .u64 .ptr .global .align 1 k_param_0,
\t.param .u32 k_param_1
)
.reqntid {threads}
{{
\t.reg .pred %p<9>;
\t.reg .b16 %rs<9>;
\t.reg .b32 %r<999>;
\t.reg .b64 %rd<99>;
\tld.param.b64 %rd1, [k_param_0];
\tmov.u32 %r1, %tid.x;
\tmul.wide.u32 %rd2, %r1, 4;
\tadd.s64 %rd3, %rd1, %rd2;
"""


def go(body, data=None, *, threads=32, shared=8192, programs=1, never=None, parameter=0, lanes=4096, **checks):
    """Run `body` with %rd1 at `data`, %rd3 at word `thread` of it, %r1 the thread; returns (run, data)."""
    data = np.zeros(256, np.uint32) if data is None else np.array(data, copy=True)
    memory = GlobalMemory(stream=checks.get("stream", False))
    allocation = memory.add("x", data.view(np.uint8))
    if never is not None:
        forbid(allocation, never)
    translation = Translation(parse(HEAD.format(threads=threads) + body + "\nret;\n}\n"))
    parameters = {"k_param_0": np.array([allocation.base], np.uint64), "k_param_1": np.array([parameter], np.uint32)}
    run = runs.Run("k", "sm_80", (programs, 1, 1), threads)
    return runs.execute(translation, memory, parameters, run, shared, runs.Checks(**checks), lanes), data


def bits(x) -> int:
    """A float's or an integer's 32 bits."""
    return struct.unpack("<I", struct.pack("<f", x))[0] if isinstance(x, float) else x & 0xFFFFFFFF


def compute(instruction, *inputs, width=32):
    """One lane's result of `instruction`, its operands a, b, c and its result d spelled {a}, {b}, {c}, {d}."""
    prefix = "%r" if width == 32 else "%rd"
    names = dict(zip("abc", (f"{prefix}{k}" for k in (11, 12, 13)), strict=True))
    moves = "".join(
        f"mov.b{width} {names[n]}, {x if width == 64 else bits(x)};\n" for n, x in zip("abc", inputs, strict=False)
    )
    store = {32: "st.global.b32 [ %rd1 + 0 ], { %r20 };", 64: "st.global.b64 [ %rd1 + 0 ], { %rd20 };"}[width]
    _, data = go(moves + instruction.format(d=f"{prefix}20", **names) + ";\n" + store)
    return int(data.view(np.uint64)[0]) if width == 64 else int(data[0])


BIG, NAN, INF = 0xFFFFFFF0, math.nan, math.inf
INTEGERS = [
    ("add.s32 {d}, {a}, {b}", (BIG, 0x20), 0x10),
    ("sub.s32 {d}, {a}, {b}", (3, 5), -2),
    ("mul.lo.s32 {d}, {a}, {b}", (0x12345678, 0x9ABCDEF), 0x12345678 * 0x9ABCDEF),
    ("mul.hi.u32 {d}, {a}, {b}", (BIG, BIG), BIG * BIG >> 32),
    ("mul.hi.s32 {d}, {a}, {b}", (-7, 3 << 30), -7 * (3 - 4) * (1 << 30) >> 32),
    ("mad.lo.s32 {d}, {a}, {b}, {c}", (7, -3, 5), -16),
    ("div.s32 {d}, {a}, {b}", (-7, 2), -3),
    ("rem.s32 {d}, {a}, {b}", (-7, 2), -1),
    ("div.u32 {d}, {a}, {b}", (BIG, 7), BIG // 7),
    ("rem.u32 {d}, {a}, {b}", (BIG, 7), BIG % 7),
    ("min.s32 {d}, {a}, {b}", (-1, 1), -1),
    ("min.u32 {d}, {a}, {b}", (-1, 1), 1),
    ("max.s32 {d}, {a}, {b}", (-1, 1), 1),
    ("min.relu.s32 {d}, {a}, {b}", (-1, 1), 0),
    ("min.relu.s32 {d}, {a}, {b}", (4, 3), 3),
    ("neg.s32 {d}, {a}", (5,), -5),
    ("shl.b32 {d}, {a}, {b}", (3, 31), 1 << 31),
    ("shl.b32 {d}, {a}, {b}", (3, 32), 0),
    ("shr.u32 {d}, {a}, {b}", (BIG, 4), BIG >> 4),
    ("shr.u32 {d}, {a}, {b}", (BIG, 40), 0),
    ("shr.s32 {d}, {a}, {b}", (BIG, 40), -1),
    ("shf.l.wrap.b32 {d}, {a}, {b}, {c}", (0x80000001, 0x10, 4), 0x108),
    ("shf.r.wrap.b32 {d}, {a}, {b}, {c}", (0x80000001, 0x13, 36), 0x38000000),
    ("shf.r.clamp.b32 {d}, {a}, {b}, {c}", (0x80000001, 0x13, 36), 0x13),
    ("bfe.u32 {d}, {a}, 4, 8", (0xABCD1234,), 0x23),
    ("bfe.s32 {d}, {a}, 4, 8", (0xABCD0F84,), -8),
    ("bfe.s32 {d}, {a}, 28, 8", (0xABCD0F84,), -6),
    ("bfe.u32 {d}, {a}, 4, 0", (0xABCD0F84,), 0),
    ("prmt.b32 {d}, {a}, {b}, 0x7502", (0x33221100, 0x77665544), 0x77550022),
    ("prmt.b32 {d}, {a}, {b}, 0x000C", (0, 0x80), 0xFF | 0),
    ("lop3.b32 {d}, {a}, {b}, {c}, 0xE8", (0xF0F0, 0xFF00, 0xAAAA), 0xFAA0),
    ("and.b32 {d}, {a}, {b}", (0xFF0, 0x0FF), 0xF0),
    ("xor.b32 {d}, {a}, {b}", (0xFF0, 0x0FF), 0xF0F),
    ("not.b32 {d}, {a}", (0xFF0,), ~0xFF0),
    ("cvt.rn.f32.s32 {d}, {a}", (-3,), -3.0),
    ("mov.b32 {{%rs1, %rs2}}, {a}; mov.b32 {d}, {{%rs2, %rs1}}", (0x12345678,), 0x56781234),
    ("cvt.u16.u32 %rs1, {a}; cvt.s32.s16 {d}, %rs1", (0x1FFFE,), -2),
    ("setp.lt.u32 %p1, {a}, {b}; selp.b32 {d}, {a}, {b}, %p1", (-1, 1), 1),
    ("setp.lt.s32 %p1, {a}, {b}; @!%p1 mov.b32 {a}, 9; mov.b32 {d}, {a}", (2, 1), 9),
]  # fmt: skip
FLOATS = [
    ("add.f32 {d}, {a}, {b}", (1.5, 2.25), 3.75),
    ("mul.f32 {d}, {a}, {b}", (1.5, -2.0), -3.0),
    ("div.full.f32 {d}, {a}, {b}", (1.0, 8.0), 0.125),
    # the product's lowest bit survives only in one rounding
    ("fma.rn.f32 {d}, {a}, {b}, {c}", (1 + 2.0**-12, 1 + 2.0**-12, -1 - 2.0**-11), 2.0**-24),
    ("ex2.approx.ftz.f32 {d}, {a}", (-3.0,), 0.125),
    ("ex2.approx.ftz.f32 {d}, {a}", (-INF,), 0.0),
    ("lg2.approx.f32 {d}, {a}", (8.0,), 3.0),
    ("rcp.approx.ftz.f32 {d}, {a}", (8.0,), 0.125),
    ("rsqrt.approx.f32 {d}, {a}", (16.0,), 0.25),
    ("max.f32 {d}, {a}, {b}", (NAN, 2.0), 2.0),
    ("min.f32 {d}, {a}, {b}", (3.0, NAN), 3.0),
    ("max.NaN.f32 {d}, {a}, {b}", (NAN, 2.0), NAN),
    ("abs.f32 {d}, {a}", (-2.0,), 2.0),
    ("neg.f32 {d}, {a}", (2.0,), -2.0),
    ("cvt.rzi.s32.f32 {d}, {a}", (-2.75,), -2),
    ("cvt.rn.bf16x2.f32 {d}, {a}, {b}", (1.0, 1 + 2.0**-8), 0x3F803F80),
    ("cvt.rn.bf16x2.f32 {d}, {a}, {b}", (-2.0, 1 + 3 * 2.0**-8), 0xC0003F82),
    ("cvt.rn.f16x2.f32 {d}, {a}, {b}", (1.0, -2.0), 0x3C00C000),
    ("mov.b32 {{%rs1, %rs2}}, {a}; cvt.f32.bf16 {d}, %rs2", (0x40400000,), 3.0),
    ("mov.b32 {{%rs1, %rs2}}, {a}; cvt.f32.f16 {d}, %rs1", (0x3E00,), 1.5),
    ("setp.neu.f32 %p1, {a}, {a}; selp.f32 {d}, {b}, {c}, %p1", (NAN, 1.0, 2.0), 1.0),
    ("setp.ne.f32 %p1, {a}, {a}; selp.f32 {d}, {b}, {c}, %p1", (NAN, 1.0, 2.0), 2.0),
    ("setp.num.f32 %p1, {a}, {b}; selp.f32 {d}, {b}, {c}, %p1", (1.0, 1.0, 2.0), 1.0),
    ("setp.gt.f32 %p1, {a}, {b}; setp.lt.or.f32 %p2, {a}, {b}, %p1; selp.f32 {d}, {a}, {c}, %p2", (3.0, 1.0, 2.0), 3.0),
]  # fmt: skip
# two at a time; the expected words by hand: e4m3 has bias 7 and one NaN, e5m2 is the upper half of a float16
HALVES = [
    ("cvt.u16.u32 %rs1, {a}; cvt.rn.f16x2.e4m3x2 {d}, %rs1", (0x7E01,), 0x5F001800),  # 448 and 2^-9
    ("cvt.u16.u32 %rs1, {a}; cvt.rn.f16x2.e4m3x2 {d}, %rs1", (0xB838,), 0xBC003C00),  # -1 and 1
    ("cvt.u16.u32 %rs1, {a}; cvt.rn.f16x2.e5m2x2 {d}, %rs1", (0xFC01,), 0xFC000100),  # -inf and 2^-16
    ("mov.b32 {{%rs1, %rs2}}, {a}; mul.f16 %rs3, %rs1, %rs2; abs.f16 %rs3, %rs3; cvt.u32.u16 {d}, %rs3", (0xC0003E00,),
     0x4200),
    ("mul.f16x2 {d}, {a}, {b}", (0x40003C01, 0x42003C01), 0x46003C02),
    ("abs.f16x2 {d}, {a}", (0xC2003C00,), 0x42003C00),
    ("setp.gt.f16x2 %p1|%p2, {a}, {b}; selp.b32 {d}, 1, 0, %p1", (0x40003C00, 0x3C003800), 1),
    ("setp.gt.f16x2 %p1|%p2, {a}, {b}; selp.b32 {d}, 1, 0, %p2", (0x38003C00, 0x3C003800), 0),
    ("mov.b32 {{%rs1, %rs2}}, {a}; cvt.bf16.f16 %rs3, %rs1; cvt.u32.u16 {d}, %rs3", (0x4300,), 0x4060),  # 3.5
    # registers of a scope, beside %r20 and %r11 of the function
    ("{{\n.reg .b32 r<2>, b;\nadd.u32 r0, {a}, 1;\nshl.b32 b, r0, 4;\nmov.b32 r1, b;\n"
     "mov.b32 {d}, r1;\n}}\nadd.u32 {d}, {d}, {a}", (2,), 50),
]  # fmt: skip
LONGS = [
    ("add.s64 {d}, {a}, {b}", (2**40, -1), 2**40 - 1),
    ("mul.lo.s64 {d}, {a}, {b}", (2**40 + 3, -5), -5 * (2**40 + 3)),
    ("mul.hi.u64 {d}, {a}, {b}", (2**63 + 5, 2**62 + 7), (2**63 + 5) * (2**62 + 7) >> 64),
    ("div.s64 {d}, {a}, {b}", (-(2**40), 3), -(2**40 // 3)),
    ("shr.s64 {d}, {a}, 4", (-(2**40),), -(2**36)),
    ("cvt.u32.u64 %r5, {a}; mul.wide.s32 {d}, %r5, -2", (2**32 + 7,), -14),
    ("cvt.u32.u64 %r5, {a}; mul.wide.u32 {d}, %r5, 4", (2**32 - 1,), 4 * (2**32 - 1)),
    ("cvt.u32.u64 %r5, {a}; mad.wide.s32 {d}, %r5, 3, {b}", (-2, 2**35), 2**35 - 6),
    ("cvt.u32.u64 %r5, {a}; cvt.s64.s32 {d}, %r5", (2**32 - 3,), -3),
    ("cvt.u32.u64 %r5, {a}; cvt.u64.u32 {d}, %r5", (-3,), 2**32 - 3),
    ("cvt.u32.u64 %r5, {a}; mov.b64 {d}, {{%r5, %r5}}", (5,), 5 * (2**32 + 1)),
]  # fmt: skip


@pytest.mark.parametrize(("instruction", "inputs", "expected"), INTEGERS + FLOATS + HALVES)
def test_one_lane_computes_the_known_answer(instruction, inputs, expected):
    got = compute(instruction, *inputs)
    if isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(struct.unpack("<f", struct.pack("<I", got))[0])
    else:
        assert got == bits(expected)


@pytest.mark.parametrize(("instruction", "inputs", "expected"), LONGS)
def test_one_lane_computes_the_known_answer_in_64_bits(instruction, inputs, expected):
    assert compute(instruction, *inputs, width=64) == expected % 2**64


def test_a_chain_of_multiply_adds_is_a_dot_product():
    """Two interleaved sums of 8 products each, then a chain too short to gather."""
    a, b = np.arange(1, 17, dtype=np.float32), np.arange(3, 19, dtype=np.float32)
    loads = "".join(
        f"mov.b32 %r{100 + k}, {bits(float(a[k]))}; mov.b32 %r{200 + k}, {bits(float(b[k]))};" for k in range(16)
    )
    chains = "".join(f"fma.rn.f32 %r{300 + k}, %r{100 + k}, %r{200 + k}, %r{298 + k};\n" for k in range(16))
    start = f"mov.b32 %r298, {bits(0.5)}; mov.b32 %r299, {bits(1.0)};"
    short = "fma.rn.f32 %r7, %r314, %r100, %r315; st.global.v4.b32 [ %rd1 + 0 ], { %r314, %r315, %r7, %r1 };"
    _, data = go(loads + start + chains + short)
    even, odd = 0.5 + float(a[::2] @ b[::2]), 1 + float(a[1::2] @ b[1::2])
    assert data.view(np.float32)[:3].tolist() == [even, odd, even + odd]


def word(body, **options):
    """The word that every thread ends with in %r9."""
    return go(body + "st.global.b32 [ %rd3 + 0 ], { %r9 };", **options)[1][: options.get("threads", 32)].tolist()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("bfly.b32 %r9, %r1, 5, 31", lambda t: t ^ 5),
        ("idx.b32 %r9, %r1, 7, 31", lambda t: 7),
        ("up.b32 %r9, %r1, 3, 0", lambda t: t - 3 if t >= 3 else t),
        ("down.b32 %r9, %r1, 3, 31", lambda t: t + 3 if t + 3 < 32 else t),
        # segments of 8 lanes
        ("idx.b32 %r9, %r1, 2, 6175", lambda t: t // 8 * 8 + 2),
    ],
)
def test_shuffles_reach_the_lanes_they_name(mode, expected):
    assert word(f"shfl.sync.{mode}, -1;", threads=64) == [expected(t % 32) + t // 32 * 32 for t in range(64)]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("add.s32", lambda lanes: sum(lanes)),
        ("max.s32", max),
        ("min.u32", min),
        ("or.b32", lambda lanes: functools.reduce(operator.or_, lanes)),
    ],
)
def test_a_reduction_gives_every_lane_of_a_warp_its_number(operation, expected):
    body = f"mul.lo.s32 %r9, %r1, 3; redux.sync.{operation} %r9, %r9, -1;"
    warps = [[3 * t for t in range(start, start + 32)] for start in (0, 32)]
    assert word(body, threads=64) == [expected(lanes) for lanes in warps for _ in lanes]


def test_a_reduction_of_a_part_of_a_warp_takes_the_lanes_that_it_names():
    # 8 lanes at a time: 0xff << (lane & 24)
    body = "and.b32 %r2, %r1, 24; shl.b32 %r3, 255, %r2; redux.sync.add.s32 %r9, %r1, %r3;"
    assert word(body) == [sum(range(t // 8 * 8, t // 8 * 8 + 8)) for t in range(32)]
    with pytest.raises(Divergence, match="other threads than those that it names"):
        word("setp.lt.u32 %p1, %r1, 9; @%p1 bra $L__a; redux.sync.add.s32 %r9, %r1, -1;\n$L__a:\n")


def test_lanes_that_part_meet_again():
    body = "setp.lt.u32 %p1, %r1, 11; mov.b32 %r9, 1; @%p1 bra $L__a; add.s32 %r9, %r9, %r1;\n"
    body += "$L__a:\nadd.s32 %r9, %r9, 100;\n"
    assert word(body) == [101 + (t if t >= 11 else 0) for t in range(32)]


def test_a_loop_of_a_different_length_in_every_thread():
    body = "mov.b32 %r9, 0; mov.b32 %r8, 0;\n$L__a:\nadd.s32 %r9, %r9, %r8; add.s32 %r8, %r8, 1;\n"
    body += "setp.le.u32 %p1, %r8, %r1; @%p1 bra $L__a;\n"
    assert word(body) == [t * (t + 1) // 2 for t in range(32)]


def test_programs_know_their_places_in_every_batch():
    body = """mov.u32 %r2, %ctaid.x; mov.u32 %r3, %nctaid.x;
    mad.lo.s32 %r4, %r2, 32, %r1; mad.lo.s32 %r5, %r2, 100, %r3;
    mul.wide.u32 %rd5, %r4, 4; add.s64 %rd6, %rd1, %rd5; st.global.b32 [ %rd6 + 0 ], { %r5 };"""
    _, data = go(body, programs=5, lanes=64)
    assert data[:160].tolist() == [100 * p + 5 for p in range(5) for _ in range(32)]


def test_atomics_add_once_per_lane():
    _, data = go("setp.lt.u32 %p1, %r1, 20; @%p1 red.global.add.u32 [ %rd1 + 4 ], { %r1 };")
    assert data[:2].tolist() == [0, 190]


# fragments, as the manual prints them: lane t = 4 g + q holds these (row, column) of each register pair
A_PLACES = [
    lambda g, q: (g, 2 * q),
    lambda g, q: (g + 8, 2 * q),
    lambda g, q: (g, 2 * q + 8),
    lambda g, q: (g + 8, 2 * q + 8),
]
B_PLACES = [lambda g, q: (2 * q, g), lambda g, q: (2 * q + 8, g)]
C_PLACES = [
    lambda g, q: (g, 2 * q),
    lambda g, q: (g, 2 * q + 1),
    lambda g, q: (g + 8, 2 * q),
    lambda g, q: (g + 8, 2 * q + 1),
]


def half_bits(kind, x):
    return np.float16(x).view(np.uint16) if kind == "f16" else np.float32(x).view(np.uint32) >> 16


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_a_product_of_fragments_is_the_product_of_matrices(kind):
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(-4, 5, (16, 16)), rng.integers(-4, 5, (16, 8)), rng.integers(-9, 9, (16, 8))
    data = np.zeros((16, 32), np.uint32)
    for t in range(32):
        g, q = t // 4, t % 4
        for k, place in enumerate(A_PLACES):
            i, j = place(g, q)
            data[k, t] = int(half_bits(kind, a[i, j])) | int(half_bits(kind, a[i, j + 1])) << 16
        for k, place in enumerate(B_PLACES):
            i, j = place(g, q)
            data[4 + k, t] = int(half_bits(kind, b[i, j])) | int(half_bits(kind, b[i + 1, j])) << 16
        for k, place in enumerate(C_PLACES):
            data[6 + k, t] = bits(float(c[place(g, q)]))
    load = "".join(f"ld.global.b32 {{ %r{30 + k} }}, [ %rd3 + {128 * k} ];" for k in range(10))
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r36, %r37, %r38, %r39}}, "
    product += "{%r30, %r31, %r32, %r33}, {%r34, %r35}, {%r36, %r37, %r38, %r39};"
    store = "".join(f"st.global.b32 [ %rd3 + {128 * (10 + k)} ], {{ %r{36 + k} }};" for k in range(4))
    _, data = go(load + product + product + store, data.ravel())
    got, expected = data.view(np.float32).reshape(16, 32)[10:14], c + 2 * (a @ b)
    for t in range(32):
        assert [got[k, t] for k in range(4)] == [expected[place(t // 4, t % 4)] for place in C_PLACES]


@pytest.mark.parametrize("transposed", ["", ".trans"])
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_matrices_are_loaded_and_stored_by_rows_of_8_halves(tiles, transposed):
    """Rows lie in reverse order; thread i points at row i."""
    halves = np.arange(tiles * 64, dtype=np.uint16).reshape(-1, 8)
    registers = ", ".join(f"%r{20 + k}" for k in range(tiles))
    body = f"""add.s64 %rd4, %rd1, 512; mul.lo.s32 %r2, %r1, 16; cvt.u64.u32 %rd5, %r2; add.s64 %rd6, %rd4, %rd5;
    sub.s32 %r3, {8 * tiles - 1}, %r1; mul.lo.s32 %r4, %r3, 16; setp.lt.u32 %p1, %r1, {8 * tiles}; max.s32 %r4, %r4, 0;
    @%p1 ld.global.v4.b32 {{ %r5, %r6, %r7, %r8 }}, [ %rd6 + 0 ];
    @%p1 st.shared.v4.b32 [ %r4 + 0 ], {{ %r5, %r6, %r7, %r8 }}; bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x{tiles}{transposed}.shared.b16 {{{registers}}}, [%r4];
    stmatrix.sync.aligned.m8n8.x{tiles}{transposed}.shared.b16 [%r4+2048], {{{registers}}}; bar.sync 0;
    ld.shared.b32 %r10, [%r2+2048]; st.global.b32 [ %rd3 + 128 ], {{ %r10 }};
    st.global.b32 [ %rd3 + 0 ], {{ %r{19 + tiles} }};"""
    data = np.zeros(512, np.uint32)
    data[128 : 128 + halves.size // 2] = halves.view(np.uint32).ravel()
    _, data = go(body, data)
    tile = halves[8 * (tiles - 1) :]
    tile = tile.T if transposed else tile
    assert data[:32].tolist() == [
        int(tile[t // 4, 2 * (t % 4)]) | int(tile[t // 4, 2 * (t % 4) + 1]) << 16 for t in range(32)
    ]
    assert data[32 : 32 + 8 * tiles].tolist() == halves[::-1].copy().view(np.uint32)[:, 0].tolist()


GROUP_PRODUCT = """
    {fence} wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r40, %r41, %r42, %r43}},
        {{%r30, %r31, %r32, %r33}}, %rd9, 0, 1, 1, 0;
    wgmma.commit_group.sync.aligned; {wait}
    st.global.v4.b32 [ %rd8 + 8192 ], {{ %r40, %r41, %r42, %r43 }};"""


def group_product(
    fence="fence.proxy.async.shared::cta;", wait="wgmma.wait_group.sync.aligned 0;", barrier="bar.sync 0;"
):
    """A [64, 16] in registers, B [16, 8] in shared memory: 8 rows of 128 bytes, swizzled; returns (a, b, result)."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(-4, 5, (64, 16)), rng.integers(-4, 5, (16, 8))
    data = np.zeros(4096, np.uint32)
    for t in range(128):
        w, g, q = t // 32, t % 32 // 4, t % 4
        for k, place in enumerate(A_PLACES):
            i, j = place(g, q)
            data[128 * k + t] = (
                int(half_bits("bf16", a[16 * w + i, j])) | int(half_bits("bf16", a[16 * w + i, j + 1])) << 16
            )
    shared = np.zeros(512, np.uint16)
    for n in range(8):
        for k in range(16):
            place = n * 128 + 2 * k
            shared[(place ^ (place >> 7 & 7) << 4) // 2] = half_bits("bf16", b[k, n])
    data[1024:1280] = shared.view(np.uint32)
    descriptor = (1 << 62 | 64 << 32 | 1 << 16) + 1024 // 16
    body = "".join(f"ld.global.b32 {{ %r{30 + k} }}, [ %rd3 + {512 * k} ];" for k in range(4))
    body += f"""mul.wide.u32 %rd7, %r1, 16; add.s64 %rd8, %rd1, %rd7; mul.lo.s32 %r2, %r1, 8;
    mov.b64 %rd9, {descriptor}; add.s64 %rd6, %rd3, %rd2;
    ld.global.v2.b32 {{ %r3, %r4 }}, [ %rd6 + 4096 ]; st.shared.v2.b32 [ %r2 + 1024 ], {{ %r3, %r4 }};
    {barrier} """
    _, data = go(body + GROUP_PRODUCT.format(fence=fence, wait=wait), data, threads=128)
    return a, b, data.view(np.float32)[2048:2560].reshape(128, 4)


def test_a_warp_group_multiplies_what_its_descriptor_points_at():
    a, b, got = group_product()
    for t in range(128):
        w, g, q = t // 32, t % 32 // 4, t % 4
        assert got[t].tolist() == [(a @ b)[16 * w + place(g, q)[0], place(g, q)[1]] for place in C_PLACES]


@pytest.mark.parametrize(("missing", "fault"), [("fence", Race), ("barrier", Race), ("wait", InFlight)])
def test_a_warp_group_needs_its_fence_its_barrier_and_its_wait(missing, fault):
    with pytest.raises(fault):
        group_product(**{missing: ""})


@pytest.mark.parametrize(("stride", "sectors"), [(4, 4), (8, 8), (32, 32), (0, 1), (36, 32)])
def test_sectors_are_the_distinct_32_bytes_of_a_request(stride, sectors):
    body = f"mul.wide.u32 %rd5, %r1, {stride}; add.s64 %rd6, %rd1, %rd5; ld.global.b32 {{ %r5 }}, [ %rd6 + 0 ];"
    run, _ = go(body, np.zeros(1024, np.uint32), programs=3, stream=True)
    assert (run.requests["x", "load"], run.sectors["x", "load"], run.bytes["x", "load"]) == (3, 3 * sectors, 3 * 128)
    assert [program for program, *_ in run.stream] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert all(len(seen) == sectors for _, _, seen, _ in run.stream)


@pytest.mark.parametrize(("stride", "wavefronts"), [(4, 1), (8, 2), (32, 8), (128, 32), (132, 1), (0, 1)])
def test_wavefronts_are_the_most_words_of_one_bank(stride, wavefronts):
    run, _ = go(f"mul.lo.s32 %r2, %r1, {stride}; ld.shared.b32 %r3, [%r2];", banks=True)
    assert run.wavefronts == {"ld.shared.b32": wavefronts}
    assert run.phases == {"ld.shared.b32": 1}


def test_wide_accesses_of_shared_memory_go_by_quarter_warps():
    run, _ = go("mul.lo.s32 %r2, %r1, 16; st.shared.v4.b32 [%r2], {%r1, %r1, %r1, %r1};", banks=True)
    assert run.wavefronts == run.phases == {"st.shared.v4.b32": 4}


def test_instructions_are_counted_per_warp_that_reaches_them():
    run, _ = go("setp.lt.u32 %p1, %r1, 32; @%p1 bra $L__a; ex2.approx.ftz.f32 %r2, %r1;\n$L__a:\n", threads=96)
    assert run.instructions["special"] == 2
    assert run.instructions["branch"] == 3 + 3


SHARED = "mul.lo.s32 %r2, %r1, 4; xor.b32 %r3, %r2, 128; "
# the neighbour's word, in the same warp
NEXT = "mul.lo.s32 %r2, %r1, 4; xor.b32 %r3, %r2, 4; "
COPY = SHARED + "cp.async.ca.shared.global [ %r2 + 0 ], [ %rd3 + 0 ], 0x4; cp.async.commit_group; "
TF32 = (
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r2, %r3, %r4, %r5}, {%r2, %r3}, {%r4}, {%r2, %r3, %r4, %r5};"
)


@pytest.mark.parametrize(
    ("body", "fault", "says"),
    [
        ("ld.global.b32 { %r5 }, [ %rd1 + 1024 ];", OutOfBounds, "byte 1024 of the 1024 of x"),
        ("ld.global.b32 { %r5 }, [ %rd1 + -4 ];", OutOfBounds, "outside every tensor"),
        ("st.global.b64 [ %rd1 + 1020 ], { %rd1 };", Misaligned, "8-byte store"),
        ("ld.global.b32 { %r5 }, [ %rd1 + 2 ];", Misaligned, "4-byte load"),
        (SHARED + "st.shared.b32 [%r2+8100], %r1;", OutOfBounds, "of 8192"),
        (SHARED + "ld.shared.v2.b32 {%r4, %r5}, [%r2];", Misaligned, "8-byte load"),
        ("setp.lt.u32 %p1, %r1, 16; @%p1 bra $L__a; bar.sync 0;\n$L__a:\n", Divergence, "part of 64"),
        ("setp.lt.u32 %p1, %r1, 9; @%p1 bra $L__a; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\n$L__a:", Divergence, "32"),
        (SHARED + "st.shared.b32 [%r2], %r1; ld.shared.b32 %r4, [%r3];", Race, "reads byte"),
        (SHARED + "ld.shared.b32 %r4, [%r3]; st.shared.b32 [%r2], %r1;", Race, "another thread's read"),
        (SHARED + "st.shared.b32 [%r2], %r1; st.shared.b32 [%r3], %r1;", Race, "overwrites byte"),
        ("mov.b32 %r2, 0; st.shared.b32 [%r2], %r1;", Race, "another lane's other value"),
        (SHARED + "st.shared.b32 [%r2], %r1; bar.warp.sync -1; ld.shared.b32 %r4, [%r3];", Race, "reads byte"),
        (SHARED + "ld.shared.b32 %r4, [%r3]; bar.warp.sync -1; st.shared.b32 [%r2], %r1;", Race, "thread's read"),
        (SHARED + "ld.shared.b32 %r4, [%r2]; ld.shared.b32 %r4, [%r3]; bar.warp.sync -1; st.shared.b32 [%r2], %r1;",
         Race, "another thread's read"),
        (SHARED + "st.shared.b32 [%r2], %r1; bar.warp.sync -1; st.shared.b32 [%r3], %r1;", Race, "overwrites byte"),
        (NEXT + "st.shared.b32 [%r2], %r1; ld.shared.b32 %r4, [%r3]; bar.warp.sync -1;", Race, "reads byte"),
        (NEXT + "bar.warp.sync -1; ld.shared.b32 %r4, [%r3]; st.shared.b32 [%r2], %r1;", Race, "another thread's read"),
        (COPY + "bar.sync 0; ld.shared.b32 %r4, [%r2];", Race, "copy"),
        (COPY + "cp.async.wait_group 1; bar.sync 0; ld.shared.b32 %r4, [%r2];", Race, "copy"),
        (COPY + "cp.async.wait_group 0; ld.shared.b32 %r4, [%r3];", Race, "write"),
    ],
)  # fmt: skip
def test_broken_rules_are_faults_that_name_the_place(body, fault, says):
    with pytest.raises(fault, match=says) as caught:
        go("\n.loc 1 77 3 // kernel.py:77:3\n" + body, threads=64)
    assert (caught.value.kernel, caught.value.line) == ("k", "kernel.py:77:3")
    assert caught.value.instruction in body


@pytest.mark.parametrize(
    "body",
    [
        SHARED
        + "st.shared.b32 [%r2], %r1; bar.sync 0; ld.shared.b32 %r4, [%r3]; bar.sync 0; st.shared.b32 [%r2], %r4;",
        SHARED + "st.shared.b32 [%r2], %r1; ld.shared.b32 %r4, [%r2]; st.shared.b32 [%r2], %r4;",
        "mov.b32 %r2, 0; st.shared.b32 [%r2], %r2;",
        SHARED + "ld.shared.b32 %r4, [%r2]; ld.shared.b32 %r5, [%r3];",
        NEXT + "st.shared.b32 [%r2], %r1; bar.warp.sync -1; ld.shared.b32 %r4, [%r3];",
        NEXT + "ld.shared.b32 %r4, [%r3]; bar.warp.sync -1; st.shared.b32 [%r2], %r1;",
        NEXT + "ld.shared.b32 %r4, [%r3]; ld.shared.b32 %r4, [%r2]; bar.warp.sync -1; st.shared.b32 [%r2], %r1;",
        NEXT + "st.shared.b32 [%r2], %r1; bar.warp.sync -1; st.shared.b32 [%r3], %r1;",
    ],
)
def test_ordered_accesses_are_no_races(body):
    go(body, threads=64)


def test_copies_land_at_the_wait_of_their_group_and_a_size_of_0_gives_zeros():
    body = (
        SHARED
        + """setp.lt.u32 %p1, %r1, 8; selp.b32 %r6, 4, 0, %p1;
    cp.async.ca.shared.global [ %r2 + 0 ], [ %rd3 + 512 ], 0x4, %r6; cp.async.commit_group;
    cp.async.ca.shared.global [ %r2 + 512 ], [ %rd3 + 512 ], 0x4; cp.async.commit_group;
    cp.async.wait_group 1; bar.sync 0; ld.shared.b32 %r9, [%r2]; st.global.b32 [ %rd3 + 0 ], { %r9 };"""
    )
    run, data = go(body, np.arange(256, dtype=np.uint32))
    assert data[:32].tolist() == [128 + t if t < 8 else 0 for t in range(32)]
    assert list(run.waits.values()) == [1]
    assert [left for _, left in run.waits] == [1]
    assert run.unfinished == 1


def test_memory_that_is_never_read_may_be_written():
    never = np.zeros(1024, bool)
    never[130] = True
    go("ld.global.b32 { %r5 }, [ %rd1 + 124 ]; st.global.b32 [ %rd3 + 128 ], { %r1 };", never=never)
    with pytest.raises(NeverRead, match="byte 128 of x, by program"):
        go("ld.global.b32 { %r5 }, [ %rd3 + 0 ]; ld.global.b32 { %r5 }, [ %rd3 + 128 ];", never=never)


def test_a_loop_without_an_end_is_stopped(monkeypatch):
    monkeypatch.setattr(runs, "_MOST_BLOCKS", 100)
    with pytest.raises(Endless, match="100 blocks"):
        go("$L__a:\nadd.s32 %r2, %r2, 1;\nbra.uni $L__a;\n")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("popc.b32 %r2, %r1;", "popc.b32"),
        ("add.sat.s32 %r2, %r1, %r1;", r"add.sat.s32 \(modifier .sat\)"),
        ("add.rz.f32 %r2, %r1, %r1;", "add.rz.f32"),
        ("bar.sync 1, 64;", "bar.sync 1, 64"),
        ("mov.u32 %r2, %smid;", "special register %smid"),
        ("@%p1 bar.sync 0;", "under a predicate"),
        ("atom.global.min.u32 %r2, [ %rd1 + 0 ], { %r1 };", "atom.global.min.u32"),
        (TF32, "m16n8k8"),
        ("ld.local.b32 %r2, [%r1];", "modifier .local"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_named_at_translation(body, named):
    with pytest.raises(Unsupported, match=named):
        Translation(parse(HEAD.format(threads=32) + "st.global.b32 [ %rd3 + 0 ], { %r1 };" + body + "ret;\n}\n"))


def test_classes_of_instructions():
    assert [label(opcode) for opcode in ("fma.rn.f32", "add.s64", "ld.global.v4.b32", "st.shared.b32", "mov.u32")] == [
        *("float", "integer", "global load", "shared store", "move"),
    ]
    assert label("cp.async.cg.shared.global") == "copy"
    assert label("cp.async.wait_group") == label("wgmma.fence.sync.aligned") == label("bar.sync") == "order"

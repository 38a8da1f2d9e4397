"""Pipes, flags, L2 and HBM of an Ascend chip: the rules by which the CPU twin makes its timeline, without the data.

The twin runs every instruction of a kernel on real numbers and checks it, which takes too long for graphs with millions
of edges. Here a kernel is the sequence of its instructions' sizes (ascend_sim_kernels), and these are the same rules:
an instruction is issued by the scalar unit, starts when its pipe is free, and takes what the cost model says
(``ascend_ops/twin/include/twin/cost.h``); a flag passes on the time at which its pipe is done. The tests compare the
two on small graphs. Two things are added that the twin cannot see, since it runs the cores one after the other: they
proceed in the order of time, so that what is in L2 is what cores at that time have read, and they share HBM.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np

S, V, M, MTE1, MTE2, MTE3, FIX = 0, 1, 2, 3, 4, 5, 7
PIPES = 8
UNITS = ("scalar", "vector", "cube", "mte1", "mte2", "mte3", "", "fix")
PARAMETERS = (
    "cube_macs", "cube_head", "vector_bytes", "vector_head", "scalar_cycles", "scalar_gm_cycles", "issue_cycles",
    "hbm_bytes", "l2_read_bytes", "l2_write_bytes", "ub_to_gm_bytes", "l0c_to_gm_bytes", "mte_head", "burst_cycles",
    "l1_to_l0a_bytes", "l1_to_l0b_bytes", "load_head", "flag_cycles", "cross_flag_cycles", "l0c_to_ub_bytes",
    "ub_to_l1_bytes", "bank_cycles", "l2_read_latency", "l2_write_latency",
)  # fmt: skip
(
    CUBE_MACS, CUBE_HEAD, VECTOR_BYTES, VECTOR_HEAD, SCALAR, SCALAR_GM, ISSUE, HBM, L2_READ, L2_WRITE, UB_TO_GM,
    L0C_TO_GM, MTE_HEAD, BURST, L0A, L0B, LOAD_HEAD, FLAG, CROSS_FLAG, L0C_TO_UB, UB_TO_L1,
    BANK, READ_LATENCY, WRITE_LATENCY,
) = range(len(PARAMETERS))  # fmt: skip
PATHS = ("hbm_read", "l2_read", "gm_write", "gm_to_ub", "gm_to_l1", "ub_to_gm", "l0c_to_gm", "l1_to_l0a", "l1_to_l0b",
         "l0c_to_ub", "ub_to_l1")  # fmt: skip
P_HBM, P_L2, P_WRITE, P_UB, P_L1, P_UB_OUT, P_L0C_OUT, P_L0A, P_L0B, P_L0C_UB, P_UB_L1 = range(len(PATHS))
LINE = 512  # bytes: what L2 brings from HBM at once
DATA_LINE = 64  # bytes of a line of the scalar unit's cache
BLOCK, GROUPS, REPEAT, REGION = 32, 16, 256, 65536  # bytes and bank groups of UB, see ascend_ops/twin/src/banks.cpp
FRACTAL = 512  # bytes
WINDOW = 1024.0
_WINDOWS = 1 << 21
HEAD, TAIL, USED, CAPACITY, LOGGED, LOG_CORES = range(6)


class Chip(NamedTuple):
    """The state of a launch.

    Args:
        t: When each pipe is free, float64 ``[cores, PIPES]``; pipe 0 is the scalar unit.
        ended: When all that each pipe was given have ended, like ``t``.
        flying: When each pipe's last copies end, a ring, ``[cores, PIPES, copies in flight]``.
        flown: Copies that each pipe has begun, int64 ``[cores, PIPES]``.
        busy: Cycles that each pipe has worked, like ``t``.
        p: The parameters, in the order of ``PARAMETERS``.
        in_l2: Whether each line of global memory is in L2, uint8.
        cached: Whether each line of the tables is in a scalar unit's cache, uint8 ``[cores, lines]``.
        cache: Those that are, in the order of arrival, a ring, int64 ``[cores, lines of a cache]``.
        arrived: Lines that have arrived there, int64 ``[cores]``.
        arrivals: Those that are, in the order of arrival, a ring.
        ctl: Counters of L2 and of the log, int64.
        hbm: Bytes that HBM has delivered in each window of time; empty for no common limit.
        hbm_rate: Bytes a cycle that HBM delivers to all cores, ``[1]``.
        moved: Bytes by path, in the order of ``PATHS``.
        work: Products of fractals and elements of vector instructions, ``[2]``.
        log: Instructions of the first block: core in the block, pipe, start, finish; float64 ``[.., 4]``.
    """

    t: np.ndarray
    ended: np.ndarray
    flying: np.ndarray
    flown: np.ndarray
    busy: np.ndarray
    p: np.ndarray
    in_l2: np.ndarray
    cached: np.ndarray
    cache: np.ndarray
    arrived: np.ndarray
    arrivals: np.ndarray
    ctl: np.ndarray
    hbm: np.ndarray
    hbm_rate: np.ndarray
    moved: np.ndarray
    work: np.ndarray
    log: np.ndarray


def make_chip(
    cores: int,
    parameters: dict[str, float],
    num_lines: int,
    num_table_lines: int,
    hbm_rate: float | None,
    log: int = 0,
    log_cores: int = 1,
) -> Chip:
    """Return an idle chip with a cold L2.

    Args:
        cores: Cores, each with its own pipes.
        parameters: Cost parameters by name.
        num_lines: Lines of global memory that the launch uses.
        num_table_lines: Lines of the tables that the scalar units read, in their own caches' lines.
        hbm_rate: Bytes a cycle that HBM delivers to all cores together, or None for no common limit.
        log: How many instructions to keep.
        log_cores: Cores of the first block, whose instructions are kept.
    """
    ctl = np.zeros(6, np.int64)
    ctl[CAPACITY], ctl[LOG_CORES] = int(parameters["l2_bytes"]) // LINE, log_cores
    return Chip(
        t=np.zeros((cores, PIPES)),
        ended=np.zeros((cores, PIPES)),
        flying=np.zeros((cores, PIPES, int(parameters["copies_in_flight"]))),
        flown=np.zeros((cores, PIPES), np.int64),
        busy=np.zeros((cores, PIPES)),
        p=np.array([parameters[name] for name in PARAMETERS], np.float64),
        in_l2=np.zeros(num_lines, np.uint8),
        cached=np.zeros((cores, num_table_lines), np.uint8),
        cache=np.zeros((cores, max(int(parameters["dcache_bytes"]) // DATA_LINE, 1)), np.int64),
        arrived=np.zeros(cores, np.int64),
        arrivals=np.zeros(num_lines + 1, np.int64),
        ctl=ctl,
        hbm=np.zeros(0 if hbm_rate is None else _WINDOWS),
        hbm_rate=np.array([hbm_rate or 0], np.float64),
        moved=np.zeros(len(PATHS)),
        work=np.zeros(2),
        log=np.zeros((log, 4)),
    )


def layout(*sizes: int, line: int = LINE) -> list[int]:
    """Return the first line of each array of so many bytes, and the number of lines."""
    return [0, *np.cumsum([-(-size // line) + 1 for size in sizes]).tolist()]


def _kept(**options: Any) -> Any:
    """Compile functions, and keep them for as long as no file they could be made from changes.

    Numba itself looks at the file of a function only, not at those of the functions that it calls.
    """
    here = Path(__file__).parent
    sources = [here / "ascend_sim_engine.py", here / "ascend_sim_kernels.py"]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]

    def compiled(function: Any) -> Any:
        usual = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(Path(usual or here / "__pycache__") / f"ascend_sim-{digest}")
        try:
            return numba.njit(nogil=True, cache=True, error_model="numpy", **options)(function)
        finally:
            numba.config.CACHE_DIR = usual

    return compiled


# Only the launches of the kernels are called from Python. What they call needs no way in from there, which takes longer
# to compile than the functions themselves.
jit = _kept()
inner = _kept(no_cpython_wrapper=True, no_cfunc_wrapper=True)


@inner
def touch(c, line, start, size):
    """Read or write bytes of an array; return what that brought from HBM, in whole lines."""
    missed = 0
    end = start + size
    at = start // LINE
    while at * LINE < end:
        if c.in_l2[line + at] == 0:
            c.in_l2[line + at] = 1
            missed += LINE
            c.arrivals[c.ctl[TAIL]] = line + at
            c.ctl[TAIL] = (c.ctl[TAIL] + 1) % c.arrivals.size
            c.ctl[USED] += 1
            while c.ctl[USED] > c.ctl[CAPACITY]:
                c.in_l2[c.arrivals[c.ctl[HEAD]]] = 0
                c.ctl[HEAD] = (c.ctl[HEAD] + 1) % c.arrivals.size
                c.ctl[USED] -= 1
        at += 1
    return missed


@inner
def _delivered(c, start, size):
    """Take bytes from the shared HBM from a time on; return when the last one is there."""
    if c.hbm.size == 0 or size == 0:
        return start
    room = c.hbm_rate[0] * WINDOW
    at = min(int(start / WINDOW), c.hbm.size - 1)
    while True:
        take = min(size, room - c.hbm[at])
        if take > 0:
            c.hbm[at] += take
            size -= take
        if size <= 0 or at == c.hbm.size - 1:
            return max(start, (at + c.hbm[at] / room) * WINDOW)
        at += 1


@inner
def issue(c, r, pipe, cycles, missed, latency):
    """Run one instruction on a pipe; ``missed`` of its bytes come from HBM, and it has ended ``latency`` later."""
    t = c.t[r]
    start = max(t[pipe], t[S])
    slot = 0
    if latency > 0:
        slot = c.flown[r, pipe] % c.flying.shape[2]
        start = max(start, c.flying[r, pipe, slot])
        c.flown[r, pipe] += 1
    finish = max(start + cycles, _delivered(c, start, missed))
    t[pipe] = finish
    c.ended[r, pipe] = max(c.ended[r, pipe], finish + latency)
    if latency > 0:
        c.flying[r, pipe, slot] = c.ended[r, pipe]
    c.busy[r, pipe] += finish - start
    t[S] += c.p[ISSUE]
    c.busy[r, S] += c.p[ISSUE]
    if c.ctl[LOGGED] < c.log.shape[0] and r < c.ctl[LOG_CORES]:
        entry = c.log[c.ctl[LOGGED]]
        entry[0], entry[1], entry[2], entry[3] = r, pipe, start, finish
        c.ctl[LOGGED] += 1


@inner
def spend(c, r, cycles):
    """Let the scalar unit work."""
    if c.ctl[LOGGED] < c.log.shape[0] and r < c.ctl[LOG_CORES] and cycles > 8:
        entry = c.log[c.ctl[LOGGED]]
        entry[0], entry[1], entry[2], entry[3] = r, S, c.t[r, S], c.t[r, S] + cycles
        c.ctl[LOGGED] += 1
    c.t[r, S] += cycles
    c.busy[r, S] += cycles


@inner
def look_up(c, r, table, first, words):
    """Read words of a table in global memory by the scalar unit; ``table``: its first line, ``first``: a word."""
    missed = 0
    at = first * 4 // DATA_LINE
    while at * DATA_LINE < (first + words) * 4:
        line = table + at
        if c.cached[r, line] == 0:
            c.cached[r, line] = 1
            missed += 1
            slot = c.arrived[r] % c.cache.shape[1]
            if c.arrived[r] >= c.cache.shape[1]:
                c.cached[r, c.cache[r, slot]] = 0
            c.cache[r, slot] = line
            c.arrived[r] += 1
        at += 1
    spend(c, r, words * c.p[SCALAR_GM] + missed * c.p[READ_LATENCY])


@inner
def end(c, r):
    """Return when all that a core was given have ended."""
    return max(c.t[r].max(), c.ended[r].max())


@inner
def signal(c, r, pipe):
    """Set a flag: return the time at which what the pipe has been given is done."""
    spend(c, r, c.p[FLAG])
    return max(max(c.t[r, pipe], c.ended[r, pipe]), c.t[r, S])


@inner
def wait(c, r, pipe, time):
    """Let a pipe wait for a flag; a negative time stands for a buffer that nobody has used yet."""
    if time >= 0:
        spend(c, r, c.p[FLAG])
        c.t[r, pipe] = max(c.t[r, pipe], time)


@inner
def sync(c, r, source, target):
    """Let a pipe wait for another one."""
    wait(c, r, target, signal(c, r, source))


@inner
def barrier(c, r):
    """Order a pipe's own instructions, which they are anyway."""
    spend(c, r, c.p[ISSUE])


@inner
def copy_in(c, r, line, start, size, stride, runs, path):
    """Copy ``runs`` runs of ``size`` bytes from global memory by MTE2."""
    missed = 0
    for run in range(runs):
        missed += touch(c, line, start + run * stride, size)
    total = runs * size
    c.moved[P_HBM] += missed
    c.moved[P_L2] += total
    c.moved[path] += total
    bursts = 0.0 if stride == size else (runs - 1) * c.p[BURST]
    cycles = c.p[MTE_HEAD] + bursts + max(missed / c.p[HBM], total / c.p[L2_READ])
    issue(c, r, MTE2, cycles, missed, c.p[READ_LATENCY])


@inner
def copy_out(c, r, line, start, size, stride, runs):
    """Copy ``runs`` runs of ``size`` bytes from UB to global memory by MTE3."""
    for run in range(runs):
        touch(c, line, start + run * stride, size)
    total = runs * size
    c.moved[P_WRITE] += total
    c.moved[P_UB_OUT] += total
    bursts = 0.0 if stride == size else (runs - 1) * c.p[BURST]
    cycles = c.p[MTE_HEAD] + bursts + max(total / c.p[L2_WRITE], total / c.p[UB_TO_GM])
    issue(c, r, MTE3, cycles, 0, c.p[WRITE_LATENCY])


@inner
def fixpipe(c, r, line, start, size, stride, runs):
    """Copy rows from L0C to global memory."""
    for run in range(runs):
        touch(c, line, start + run * stride, size)
    total = runs * size
    c.moved[P_WRITE] += total
    c.moved[P_L0C_OUT] += total
    rate = max(total / c.p[L2_WRITE], total / c.p[L0C_TO_GM])
    issue(c, r, FIX, c.p[MTE_HEAD] + (runs - 1) * c.p[BURST] + rate, 0, c.p[WRITE_LATENCY])


@inner
def vector(c, r, elements, size, stalls):
    """Run one vector instruction over elements of ``size`` bytes; ``stalls`` as :func:`bank_stalls` counts them."""
    if elements > 0:
        c.work[1] += elements
        cycles = c.p[VECTOR_HEAD] + elements * size / c.p[VECTOR_BYTES] + stalls * c.p[BANK]
        issue(c, r, V, cycles, 0, 0.0)
    else:
        issue(c, r, V, 0.0, 0, 0.0)


@inner
def _bank(block):
    return block % GROUPS + GROUPS * (block * BLOCK // REGION)


@inner
def bank_stalls(total, to, size, first, first_size, second, second_size):
    """Count the cycles that bank groups of UB make a vector instruction wait, as the twin's banks.cpp does.

    ``total``: its bytes, 256 in a repeat. ``to``, ``first``, ``second``: where result and operands begin, and the bytes
    of each; a second operand of no bytes is none. Operands that are the same bytes are read once.
    """
    stalls = 0
    starts, sizes = (first, second, to), (first_size, second_size, size)
    begin, count = np.zeros(3, np.int64), np.zeros(3, np.int64)
    reads = np.zeros(GROUPS, np.int64)
    for repeat in range((total + REPEAT - 1) // REPEAT):
        most = 1
        read = np.uint64(0)
        conflict = False
        for operand in range(3):
            low = sizes[operand] * repeat * REPEAT // total
            high = min(sizes[operand], sizes[operand] * (repeat + 1) * REPEAT // total)
            begin[operand] = (starts[operand] + low) // BLOCK
            count[operand] = (starts[operand] + high + BLOCK - 1) // BLOCK - begin[operand] if high > low else 0
        reads[:] = 0
        for operand in range(2):
            for block in range(begin[operand], begin[operand] + count[operand]):
                read |= np.uint64(1) << np.uint64(_bank(block))
                if operand == 1 and begin[0] <= block < begin[0] + count[0]:
                    continue
                reads[block % GROUPS] += 1
                most = max(most, reads[block % GROUPS])
        for block in range(begin[2], begin[2] + count[2]):
            conflict |= (read >> np.uint64(_bank(block))) & np.uint64(1) != 0
        late = False
        for operand in range(2):
            alike = count[operand] == count[2]
            for i in range(count[2] if alike else 0):
                alike &= _bank(begin[operand] + i) == _bank(begin[2] + i)
            late |= alike
        stalls += most - 1 + (conflict and not late)
    return stalls


@inner
def load_a(c, r, mf, kf, at_once):
    """L1 -> L0A, one instruction per row of fractals, or one for all."""
    for _ in range(1 if at_once else mf):
        size = (mf * kf if at_once else kf) * FRACTAL
        c.moved[P_L0A] += size
        issue(c, r, MTE1, c.p[LOAD_HEAD] + size / c.p[L0A], 0, 0.0)


@inner
def load_b(c, r, kf, nf, at_once):
    """L1 -> L0B, one instruction per row of fractals, or one for all."""
    for _ in range(1 if at_once else kf):
        size = (kf * nf if at_once else nf) * FRACTAL
        c.moved[P_L0B] += size
        issue(c, r, MTE1, c.p[LOAD_HEAD] + size / c.p[L0B], 0, 0.0)


@inner
def multiply(c, r, mf, nf, kf):
    """Run one instruction of the cube unit."""
    c.work[0] += mf * nf * kf
    issue(c, r, M, c.p[CUBE_HEAD] + mf * nf * kf / c.p[CUBE_MACS], 0, 0.0)
    if mf * nf < 10:
        barrier(c, r)


@inner
def ub_to_l1(c, r, size, pieces):
    """Copy from UB to L1 in the fractal layout, 16 columns at a time (unified core)."""
    c.moved[P_UB_L1] += size * pieces
    for _ in range(pieces):
        issue(c, r, MTE3, c.p[LOAD_HEAD] + size / c.p[UB_TO_L1], 0, 0.0)


@inner
def l0c_to_ub(c, r, size):
    """Copy from L0C to UB by the vector unit (unified core)."""
    c.moved[P_L0C_UB] += size
    issue(c, r, V, c.p[VECTOR_HEAD] + size / c.p[L0C_TO_UB], 0, 0.0)

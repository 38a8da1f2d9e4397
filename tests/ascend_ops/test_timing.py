"""What instructions take on the twin: each rule of its timing by a kernel that would take another time without it."""

from pathlib import Path

import numpy as np
import pytest

from lightning_gnn.ascend_ops.twin import ReadOnly, Twin

CLOCK = 1.85e3  # cycles a microsecond
SHARE = 1421e3 / 1850 / 48  # bytes a cycle of HBM for each vector core when all of them read
LINE = 512


@pytest.fixture(scope="module")
def twin():
    return Twin([Path(__file__).parent / "kernels" / "timing.cpp"])


def copy(twin, copies, rows, size, stride=None, out=0, blocks=1, **parameters):
    stride = stride or copies * size * blocks
    x = np.zeros((rows - 1) * stride + blocks * copies * size, np.uint8)
    args = [x if out else ReadOnly(x), copies, rows, size, stride, out]
    return twin.launch("copy_tiles", args, blocks, parameters=parameters)


def add(twin, *where):
    """Return the cycles of one more addition of 64 repeats."""
    once, twice = (twin.launch("add_at", [*where, times], 1).busy("vector") for times in (1, 2))
    return twice - once


@pytest.mark.parametrize(
    ("a", "b", "y", "block", "repeat", "ticks", "within"),
    [
        (0, 0x10100, 0x20000, 1, 8, 2390, 0.02),  # every operand in banks of its own
        (0, 0x04000, 0x10000, 1, 8, 4167, 0.03),  # both read from one bank
        (0, 0x10000, 0x14100, 1, 8, 4167, 0.03),  # from two banks of a group
        (0, 0x10100, 0x04000, 1, 8, 2389, 0.02),  # the result in an operand's banks, block by block
        (0, 0x10100, 0x04020, 1, 8, 3751, 0.10),  # and one block further
        (0, 0x10100, 0x10100, 1, 8, 2390, 0.02),  # in place
        (0, 0x10100, 0x10100, 0, 1, 3584, 0.11),  # one block for a whole repeat, the next one for the next
        (0, 0x10100, 0x10100, 0, 8, 2389, 0.02),  # and every eighth
    ],
)
def test_banks_wait_as_measured(twin, a, b, y, block, repeat, ticks, within):
    """asc-devkit's bank_conflict_ub on an Atlas A2: a thousand additions in ticks of 20 ns."""
    assert add(twin, a, b, y, block, repeat) == pytest.approx(ticks * 0.02 * CLOCK / 1000, rel=within)


@pytest.mark.parametrize(
    ("a", "b", "y", "count", "microseconds"),
    [(0, 32768, 65536, 16384, 12.846), (0, 32512, 131072, 16256, 6.954), (0, 8192, 16384, 4096, 15.885)],
)
def test_sums_take_what_was_measured(twin, a, b, y, count, microseconds):
    """asc-devkit's add_high_performance: 8192 x 8192 halves on 48 cores; the second avoids conflicts."""
    fill = twin.launch("add_count", [a, b, y, 0], 1).busy("vector")
    cycles = twin.launch("add_count", [a, b, y, count], 1).busy("vector") - fill
    assert cycles == pytest.approx(microseconds * CLOCK / (8192 * 8192 / 48 / count), rel=0.02)


@pytest.mark.parametrize(
    ("copies", "rows", "size", "cycles"),
    [(400, 1, 128, 20.6), (16, 64, 128, 531.8), (2, 64, 2048, 7810.7)],
)
def test_copies_take_what_was_measured(twin, copies, rows, size, cycles):
    """asc-devkit's data_copy: 48 cores read rows from HBM, piece after piece."""
    run = copy(twin, copies, rows, size, blocks=48, hbm_bytes=SHARE)
    assert run.bytes["hbm_read"] == run.bytes["l2_read"]
    assert run.busy("mte2") / 48 / copies == pytest.approx(cycles, rel=0.20)


def test_a_line_of_l2_comes_from_hbm_at_once(twin):
    whole = copy(twin, 4, 1, 128)
    assert whole.bytes["hbm_read"] == LINE == whole.bytes["l2_read"]
    apart = copy(twin, 1, 4, 128, stride=LINE)
    assert apart.bytes["hbm_read"] == 4 * LINE == 4 * apart.bytes["l2_read"]
    assert apart.busy("mte2") > whole.busy("mte2")
    lines = copy(twin, 1, 4, 32, stride=LINE, l2_bytes=2 * LINE)
    assert lines.bytes["hbm_read"] == 4 * LINE  # two of them are gone again


@pytest.mark.parametrize(("out", "name", "cycles"), [(0, "l2_read_latency", 241), (1, "l2_write_latency", 96)])
def test_a_copy_ends_its_latency_after_its_last_byte(twin, out, name, cycles):
    assert twin.parameters[name] == cycles
    with_it, without = copy(twin, 1, 1, 4096, out=out), copy(twin, 1, 1, 4096, out=out, **{name: 0})
    assert with_it.makespan - without.makespan == cycles
    assert with_it.busy("mte3" if out else "mte2") == without.busy("mte3" if out else "mte2")


def test_copies_overlap_until_so_many_are_in_flight(twin):
    """Of n copies in flight one starts when the n-th before it has ended."""
    fast = {"hbm_bytes": 1e9, "l2_read_bytes": 1e9, "mte_head": 1}
    taken = {limit: copy(twin, 64, 1, 32, copies_in_flight=limit, **fast).makespan for limit in (1, 4, 16, 1000)}
    one = 1 + twin.parameters["l2_read_latency"]
    assert taken[1] == pytest.approx(64 * one, rel=0.01)
    assert taken[4] == pytest.approx(16 * one, rel=0.02)
    assert taken[16] == pytest.approx(4 * one, rel=0.07)
    assert taken[1000] == pytest.approx(64 + one, rel=0.2)


def scalar(twin, count, stride, times=1, clean=0, **parameters):
    x, y = np.arange(max(count * stride // 4, 1), dtype=np.int32), np.zeros(1, np.int32)
    run = twin.launch("scalar_reads", [ReadOnly(x), y, count, stride, times, clean], 1, parameters=parameters)
    assert y[0] == times * x[:: stride // 4][:count].sum()
    reads = run.busy("scalar") - twin.parameters["scalar_gm_cycles"] * (times * count + 1)
    return reads / twin.parameters["l2_read_latency"] - 1  # lines that were missing, but that of the result


def test_scalar_reads_go_through_a_cache(twin):
    assert scalar(twin, 64, 4) == 4  # sixteen words of a line
    assert scalar(twin, 64, 64) == 64
    assert scalar(twin, 64, 4, times=3) == 4
    assert scalar(twin, 64, 4, times=3, clean=2) == 12  # emptied in between
    assert scalar(twin, 64, 4, clean=1) == 64  # a line forgotten after every read
    assert scalar(twin, 64, 64, times=2, dcache_bytes=64 * 64) == 64
    assert scalar(twin, 64, 64, times=2, dcache_bytes=63 * 64) == 128  # the oldest is out when it is asked for again


def test_banks_may_cost_nothing(twin):
    where = [0, 0x4000, 0x10000, 1, 8, 1]
    with_them, without = (
        twin.launch("add_at", where, 1, parameters={"bank_cycles": cycles}).busy("vector") for cycles in (1, 0)
    )
    assert with_them - without == 64  # one access more in every repeat

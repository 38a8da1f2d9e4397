"""Instruction times on the twin: each timing rule is tested by a kernel whose time depends on it."""

from pathlib import Path

import numpy as np
import pytest

from lightning_gnn.ascend_ops.twin import ReadOnly, Twin

CLOCK = 1.85e3  # cycles per microsecond


@pytest.fixture(scope="module")
def twin():
    return Twin([Path(__file__).parent / "kernels" / "timing.cpp"])


def time_copies(twin, copies, rows, size, stride=None, out=0, blocks=1, **parameters):
    stride = stride or copies * size * blocks
    x = np.zeros((rows - 1) * stride + blocks * copies * size, np.uint8)
    args = [x if out else ReadOnly(x), copies, rows, size, stride, out]
    return twin.launch("copy_tiles", args, blocks, parameters=parameters)


def time_addition(twin, *where):
    """Return the cycles of one additional addition of 64 repeats."""
    once, twice = (twin.launch("add_at", [*where, times], 1).busy("vector") for times in (1, 2))
    return twice - once


@pytest.mark.parametrize(
    ("a", "b", "y", "block", "repeat", "ticks", "within"),
    [
        (0, 0x10100, 0x20000, 1, 8, 2390, 0.02),  # each operand in its own banks
        (0, 0x04000, 0x10000, 1, 8, 4167, 0.03),  # both read from one bank
        (0, 0x10000, 0x14100, 1, 8, 4167, 0.03),  # from two banks of one group
        (0, 0x10100, 0x04000, 1, 8, 2389, 0.02),  # the result in an operand's banks, block by block
        (0, 0x10100, 0x04020, 1, 8, 3751, 0.10),  # the same, shifted by one block
        (0, 0x10100, 0x10100, 1, 8, 2390, 0.02),  # in place
        (0, 0x10100, 0x10100, 0, 1, 3584, 0.11),  # one block per repeat
        (0, 0x10100, 0x10100, 0, 8, 2389, 0.02),  # every eighth block
    ],
)
def test_banks_wait_as_measured(twin, a, b, y, block, repeat, ticks, within):
    """asc-devkit's bank_conflict_ub on an Atlas A2: a thousand additions, in ticks of 20 ns."""
    assert time_addition(twin, a, b, y, block, repeat) == pytest.approx(ticks * 0.02 * CLOCK / 1000, rel=within)


@pytest.mark.parametrize(
    ("a", "b", "y", "count", "microseconds"),
    [(0, 32768, 65536, 16384, 12.846), (0, 32512, 131072, 16256, 6.954), (0, 8192, 16384, 4096, 15.885)],
)
def test_sums_take_what_was_measured(twin, a, b, y, count, microseconds):
    """asc-devkit's add_high_performance: 8192 x 8192 float16 on 48 cores; the second variant avoids conflicts."""
    fill = twin.launch("add_count", [a, b, y, 0], 1).busy("vector")
    cycles = twin.launch("add_count", [a, b, y, count], 1).busy("vector") - fill
    assert cycles == pytest.approx(microseconds * CLOCK / (8192 * 8192 / 48 / count), rel=0.02)


@pytest.mark.parametrize(("out", "name", "cycles"), [(0, "l2_read_latency", 241), (1, "l2_write_latency", 96)])
def test_a_copy_ends_its_latency_after_its_last_byte(twin, out, name, cycles):
    assert twin.parameters[name] == cycles
    with_it, without = time_copies(twin, 1, 1, 4096, out=out), time_copies(twin, 1, 1, 4096, out=out, **{name: 0})
    assert with_it.makespan - without.makespan == cycles
    assert with_it.busy("mte3" if out else "mte2") == without.busy("mte3" if out else "mte2")

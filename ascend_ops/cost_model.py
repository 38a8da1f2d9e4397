"""What an aggregation costs on an Ascend chip: cycles of each chunk, by the copies, rows and instructions it makes.

One model for both kernels. Every unit of a core (``ascend_ops/twin/include/twin/cost.h`` has the parameters) works a
number of cycles that follows from counts: rows copied, entries, tiles, runs. Units work side by side where buffers are
double, so a chunk takes as long as its busiest unit and a small part of the others' time. That part, and what a core
waits before its first tile is there, are fitted to the twin (``EXPOSED``, ``FILL``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_gnn.ascend_ops.build import TWIN

Kernel = Literal["cube", "gathered", "vector"]
Array = npt.NDArray[Any]

TILE_COLUMNS, UNIFIED_COLUMNS = 128, 64
"""Columns of a dense tile, on split cores and on a unified one."""
PANEL = {"cube": 256, "gathered": 256, "vector": 2048}
"""Columns of the features that a kernel handles at once (host_tiling.h)."""
BATCH = 256
"""Entries that aggregate_vector brings to UB at once."""
HBM_GB_S = 1421.0
"""Of an Atlas A2: 24 cores times ``ddr_rate`` of CANN's platform configuration (Ascend910B1.ini) times the clock."""
EXPOSED = {("vector", 2): 0.02, ("vector", 1): 0.25, ("cube", 2): 0.035, ("cube", 1): 0.10}
"""Part of the cycles of all but the busiest unit that nothing hides, by kernel and buffers of a queue."""
FILL = {"vector": 0.0, "cube": 0.9}
"""Part of a tile's such cycles that a core waits at its beginning and its end."""


@dataclass(frozen=True, eq=False)
class Counts:
    """What the chunks of one direction of a graph hold, each array ``[num_chunks]``.

    Args:
        rows: Rows that have entries.
        entries: Entries.
        columns: Distinct columns: rows of the features that the cube kernel loads.
        runs: Runs of rows whose results lie side by side.
        batches: Lists that the vector kernel brings to UB, of at most 256 entries of one row.
        column_runs: Runs of neighbours among the distinct columns.
        num_sources: Rows of the features that are read at all.
    """

    rows: Array
    entries: Array
    columns: Array
    runs: Array
    batches: Array
    column_runs: Array
    num_sources: int


@cache
def atlas_a2() -> Mapping[str, float]:
    """Return the numbers of an Atlas A2 (910B), by the names that twin/include/twin/cost.h gives them."""
    text = (TWIN / "include" / "twin" / "cost.h").read_text()
    found = re.findall(r'^ +X\((\w+), ([\d.]+), "', text, re.MULTILINE)
    return MappingProxyType({name: float(value) for name, value in found} | {"hbm_gb_s": HBM_GB_S})


def chunk_cycles(
    kernel: Kernel,
    counts: Counts,
    num_columns: int,
    num_groups: int,
    chip: Mapping[str, float],
    buffers: int = 2,
    heads: int = 1,
) -> tuple[Array, float]:
    """Return the cycles of each chunk for the widest group, float64 ``[num_chunks]``, and those of a core's start.

    Args:
        kernel: ``"cube"``, whose chunks have at most 128 rows, or ``"vector"``.
        counts: Of the chunks.
        num_columns: D.
        num_groups: M.
        chip: Parameters by the names of the twin's; with ``ub_to_l1_bytes`` a core is unified, without it split.
        buffers: 2 for double buffering, else 1.
        heads: Heads with weights of their own.
    """
    width, pieces = panels(num_columns, num_groups, kernel, heads)
    unified = chip.get("ub_to_l1_bytes", 0) > 0
    byte = row_byte(kernel, counts, num_columns, chip)
    if kernel == "vector":
        busiest, total = _vector(counts, width, pieces, chip, byte)
    else:
        busiest, total = _cube(counts, width, pieces, chip, byte, unified)
    others = total - busiest
    steps = np.maximum(pieces * _tiles(counts, unified), 1)
    return busiest + EXPOSED[kernel, buffers] * others, FILL[kernel] * float((others / steps).max(initial=0))


def row_sums_cycles(num_rows: int, num_entries: int, num_columns: int, cores: int, chip: Mapping[str, float]) -> float:
    """Return the cycles in which the vector cores add up the rows of a mini-batch, as aggregate_update does.

    Args:
        num_rows: Rows of the result.
        num_entries: Entries, evenly spread over the rows.
        num_columns: Columns of the features.
        cores: AI cores, of two vector cores each; each takes 64 rows of every tile of 128.
        chip: Parameters by the names of the twin's.
    """
    p = chip
    width = 16 * -(-num_columns // 16)
    pieces = -(-width // PANEL["vector"])
    tiles = -(-num_rows // 128)
    own = -(-tiles // cores)  # of the core that has most, which may have the last one
    last = min(num_rows - 128 * (tiles - 1), 64) if (tiles - 1) % cores == 0 else 64
    rows = 64 * (own - 1) + last
    entries = rows * num_entries / max(num_rows, 1)
    lists = pieces * -(-entries // BATCH)
    head, flag, vector = p["mte_head"], p["flag_cycles"], p["vector_head"]
    instruction = pieces * vector + 4 * width / p["vector_bytes"]
    row = pieces * head + 2 * width * list_byte(p)
    units = (
        lists * (head + 8 * flag) + pieces * (rows * (p["scalar_gm_cycles"] + 6 * flag) + entries * (4 * flag + 7)),
        (2 * entries + 3 * rows) * instruction,
        lists * 2 * head + entries * row,
        rows * (pieces * head + 2 * width * stored_byte(p)),
    )
    busiest = max(units)
    return busiest + EXPOSED["vector", 2] * (sum(units) - busiest) + lists * (2 * head + row)


def product_cycles(m: int, k: int, n: int, cores: int, chip: Mapping[str, float]) -> float:
    """Return the cycles in which the cube cores multiply ``[m, k]`` with ``[k, n]``, as update does.

    Args:
        m: Rows.
        k: Length of the products; where it alone is long, it is cut.
        n: Columns.
        cores: AI cores.
        chip: Parameters by the names of the twin's.
    """
    p = chip
    down, across, steps = -(-m // 128), -(-n // 128), -(-k // 128)
    high, wide, depth = (min(16 * -(-size // 16), 128) for size in (m, n, k))
    tiles = down * across
    share = -(-tiles * steps // cores) if tiles < cores else -(-tiles // cores) * steps  # steps of the busiest core
    stored = -(-share // steps)
    # Each operand comes from HBM once, for the first tile that wants it; parts of rows lie apart.
    taken = 1 / p["l2_read_bytes"]
    left, right = (taken + (list_byte(p) - taken) * min(bands / stored, 1) for bands in (down, across))
    runs = (high + wide - 2) * p["burst_cycles"] if steps > 1 else 0
    units = (
        share * (2 * p["mte_head"] + runs + 2 * depth * (high * left + wide * right)),
        share * (p["load_head"] * (high // 16 + 1))
        + share * 2 * depth * (high / p["l1_to_l0a_bytes"] + wide / p["l1_to_l0b_bytes"]),
        share * (p["cube_head"] + depth * high * wide / 4096 / p["cube_macs"]),
        stored * (p["mte_head"] + high * p["burst_cycles"] + 4 * high * wide / p["l0c_to_gm_bytes"]),
    )
    busiest = max(units)
    return busiest + EXPOSED["cube", 2] * (sum(units) - busiest) + FILL["cube"] * (sum(units) - busiest) / share


def panels(num_columns: int, num_groups: int, kernel: Kernel, heads: int = 1) -> tuple[int, int]:
    """Return the columns of the widest group, filled up to blocks of 16, and in how many panels they are handled.

    Args:
        num_columns: D, of all heads.
        num_groups: M.
        kernel: Which one.
        heads: Heads with weights of their own, each of whole blocks; a panel is of one head.
    """
    blocks = heads * -(-num_columns // heads // 16)
    width = 16 * -(-blocks // num_groups)
    return width, max(-(-width // PANEL[kernel]), -(-heads // num_groups))


def rows_copied(kernel: Kernel, counts: Counts) -> Array:
    """Return the rows of the features that each chunk copies, once per panel (aggregate_gathered: once)."""
    return counts.entries if kernel == "vector" else counts.columns


def hbm_bytes(kernel: Kernel, counts: Counts, num_columns: int, chip: Mapping[str, float]) -> float:
    """Return the bytes of features that come from HBM: each row once, and again what L2 has no room for."""
    table = 2.0 * counts.num_sources * num_columns
    copied = 2.0 * float(rows_copied(kernel, counts).sum()) * num_columns
    lost = max(0.0, 1 - chip["l2_bytes"] / table) if table else 0.0
    return table + lost * max(copied - table, 0)


def _tiles(counts: Counts, unified: bool) -> Array:
    return -(-counts.columns // (UNIFIED_COLUMNS if unified else TILE_COLUMNS))


def row_byte(kernel: Kernel, counts: Counts, num_columns: int, chip: Mapping[str, float]) -> float:
    """Return the cycles of a byte of a row that is copied in, on average over HBM and L2."""
    copied = 2.0 * float(rows_copied(kernel, counts).sum()) * num_columns
    missed = hbm_bytes(kernel, counts, num_columns, chip) / copied if copied else 0.0
    return missed * list_byte(chip) + (1 - missed) / chip["l2_read_bytes"]


def _vector(c: Counts, width: int, pieces: int, p: Mapping[str, float], row_byte: float) -> tuple[Array, Array]:
    """Return the cycles of the busiest unit in each chunk and those of all; aggregate_vector.cpp says what they do."""
    head, flag = p["mte_head"], p["flag_cycles"]
    work = 2 * (c.rows + c.entries)  # vector instructions over a panel
    lists = pieces * (2 * head * c.batches + 8 * list_byte(p) * c.entries)
    units = np.stack([
        # The scalar unit waits for a vertex's lists before it can ask for its rows.
        lists + pieces * (c.rows * (3 * p["scalar_gm_cycles"] + 12) + 10 * c.batches * flag
                          + c.entries * (4 * flag + 7)),
        work * (pieces * p["vector_head"] + 4 * width / p["vector_bytes"]),
        lists + pieces * head * c.entries + 2 * width * row_byte * c.entries,
        c.rows * (pieces * head + 2 * width * stored_byte(p)),
    ])  # fmt: skip
    return units.max(0), units.sum(0)


def _cube(
    c: Counts, width: int, pieces: int, p: Mapping[str, float], row_byte: float, unified: bool
) -> tuple[Array, Array]:
    """Return the same for aggregate_cube; half a tile is a vector core's where cores are split."""
    head, vector_head, flag, look_up = p["mte_head"], p["vector_head"], p["flag_cycles"], p["scalar_gm_cycles"]
    tiles = _tiles(c, unified)
    m, k = 16 * -(-c.rows // 16), 16 * -(-c.columns // 16)
    half = 1 if unified else 2
    lists = pieces * (3 * head * tiles * (2 if unified else 1) + list_byte(p) * (4 * k + 4 * c.entries) / half)
    rows = c.columns / half * pieces * head + 2 * width * row_byte * c.columns / half
    scatter = pieces * (1.5 * p["scalar_cycles"] * c.entries + 2 * c.columns) / half
    clean = (pieces * tiles * 6 * vector_head
             + (2 * pieces * m * k + 2 * width * k * 3.125) / half / p["vector_bytes"])  # fmt: skip
    loads = p["load_head"] * (pieces * tiles * m / 16 + k / 16 * -(-width // 128))
    loads += 512 * (pieces * m * k / 256 / p["l1_to_l0a_bytes"] + k * width / 256 / p["l1_to_l0b_bytes"])
    cube = p["cube_head"] * tiles * -(-width // 128) + m * k * width / 4096 / p["cube_macs"]
    issue = pieces * tiles * (6 * look_up + 40 * flag)
    runs = pieces * c.runs * (3 * look_up + flag)
    tile_bytes = 2 * pieces * m * k + 2 * width * k
    store = pieces * (c.runs * head + (c.rows - c.runs) * p["burst_cycles"])
    if unified:
        to_l1 = p["load_head"] * (pieces * k / 16 + tiles * width / 16) + tile_bytes / p["ub_to_l1_bytes"]
        drain = pieces * vector_head + 4 * m * width / p["l0c_to_ub_bytes"]
        store = store + 2 * width * stored_byte(p) * c.rows
        # The scalar unit asks for no rows while it sends results away, so the last tile of a row block takes longer.
        rest = 1 - 1 / np.maximum(tiles, 1)
        before = np.stack([issue + scatter, clean, lists + rows, to_l1, loads, cube])
        end = np.zeros_like(before)
        end[0], end[1], end[3] = runs, drain, store
        return rest * before.max(0) + ((1 - rest) * before + end).max(0), (before + end).sum(0)
    moved = 2 * pieces * tiles * head
    units = np.stack([
        pieces * tiles * (6 * look_up + 20 * flag) + scatter,
        clean,
        lists + rows,
        moved + tile_bytes / 2 * stored_byte(p),
        issue + runs,
        moved + tile_bytes / p["l2_read_bytes"],
        loads,
        cube,
        store + 2 * width * c.rows * max(1 / p["l2_write_bytes"], 1 / p["l0c_to_gm_bytes"]),
    ])  # fmt: skip
    return units.max(0), units.sum(0)


def list_byte(p: Mapping[str, float]) -> float:
    """Return the cycles of a byte of a list, which is read once."""
    return max(1 / p["hbm_bytes"], 1 / p["l2_read_bytes"])


def stored_byte(p: Mapping[str, float]) -> float:
    """Return the cycles of a byte from UB to global memory."""
    return max(1 / p["l2_write_bytes"], 1 / p["ub_to_gm_bytes"])

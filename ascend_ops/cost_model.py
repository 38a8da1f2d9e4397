"""What an aggregation costs on an Ascend chip: cycles of each chunk, by the copies, rows and instructions it makes.

One model for both kernels. Every unit of a core (``ascend_ops/twin/include/twin/cost.h`` has the parameters) works a
number of cycles that follows from counts: rows copied, entries, tiles, runs. Units work side by side where buffers are
double, so a chunk takes as long as its busiest unit and a small part of the others' time. That part, and what a core
waits before its first tile is there, are fitted to the twin (``EXPOSED``, ``FILL``).
"""

from __future__ import annotations

import math
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
BATCH, AT_ONCE, UB_BYTES = 1024, 16, 188416
"""Entries that the vector kernels list at once, rows that they ask for at once, and what UB has room for
(host_tiling.h)."""
HBM_GB_S = 1421.0
"""Of an Atlas A2: 24 cores times ``ddr_rate`` of CANN's platform configuration (Ascend910B1.ini) times the clock."""
EXPOSED = {
    ("vector", 2): 0.01, ("vector", 1): 0.05, ("update", 2): 0.05, ("cube", 2): 0.035, ("cube", 1): 0.11,
    ("unified", 2): 0.035, ("unified", 1): 0.02,
}  # fmt: skip
"""Part of the cycles of all but the busiest unit that nothing hides, by kernel and buffers of a queue; ``"unified"`` is
the cube kernel on a core that has both units, ``"update"`` the sums of aggregate_update, which also stands for a core's
having more entries than the average."""
FILL = {"cube": 0.5, "unified": 0.5}
"""Part of a tile's such cycles that a core waits at its beginning and its end."""


@dataclass(frozen=True, eq=False)
class Counts:
    """What the chunks of one direction of a graph hold, each array ``[num_chunks]``.

    Args:
        rows: Rows that have entries.
        columns: Distinct columns: rows of the features that the cube kernel loads.
        runs: Runs of rows whose results lie side by side.
        column_runs: Runs of neighbours among the distinct columns.
        num_sources: Rows of the features that are read at all.
    """

    rows: Array
    entries: Array
    columns: Array
    runs: Array
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
        chip: Parameters by the names of the twin's; with ``ub_to_l1_bytes`` a core is unified, without it split.
        buffers: 2 for double buffering, else 1.
    """
    width, pieces = panels(num_columns, num_groups, kernel, heads)
    unified = chip.get("ub_to_l1_bytes", 0) > 0
    byte = row_byte(kernel, counts, num_columns, chip)
    if kernel == "vector":
        return _vector(counts, width, pieces, chip, byte, buffers)
    busiest, total = _cube(counts, width, pieces, chip, byte, unified, buffers)
    kind = "unified" if unified else kernel
    others = total - busiest
    steps = np.maximum(pieces * _tiles(counts, unified), 1)
    start = FILL[kind] * float((others / steps).max(initial=0))
    return busiest + EXPOSED[kind, buffers] * others, start + _fill(chip)


def row_sums_cycles(num_rows: int, num_entries: int, num_columns: int, cores: int, chip: Mapping[str, float]) -> float:
    """Return the cycles in which the vector cores add up the rows of a mini-batch, as aggregate_update does.

    Args:
        num_entries: Entries, evenly spread over the rows.
        cores: AI cores, of two vector cores each; each takes 64 rows of every tile of 128.
    """
    width = 16 * -(-num_columns // 16)
    pieces = -(-width // PANEL["vector"])
    tiles = -(-num_rows // 128)
    own = -(-tiles // cores)  # of the core that has most, which may have the last one
    last = min(num_rows - 128 * (tiles - 1), 64) if (tiles - 1) % cores == 0 else 64
    rows = 64 * (own - 1) + last
    entries = rows * num_entries / max(num_rows, 1)
    look_up = chip["scalar_gm_cycles"] + chip["l2_read_latency"] / 16
    exposed = EXPOSED["update", 2]
    cycles, waited = _sums(np.array(rows), np.array(entries), width, pieces, chip, list_byte(chip), 2, look_up, exposed)
    opened = 19 * chip["scalar_gm_cycles"] + 3 * chip["l2_read_latency"]  # tiling, the first and last rows' edges
    return opened + float(cycles) + own * pieces * -(-entries / own // BATCH) * waited


def rows_at_once(num_columns: int) -> int:
    """Return how many rows of the features the vector kernels ask for at once, as host_structs.cpp does.

    Args:
        num_columns: Columns of the widest panel, a multiple of 16.
    """
    row = 8 * num_columns
    return min(AT_ONCE, (UB_BYTES - 16 * BATCH - row - 768) // row)


def product_cycles(m: int, k: int, n: int, cores: int, chip: Mapping[str, float]) -> float:
    """Return the cycles in which the cube cores multiply ``[m, k]`` with ``[k, n]``, as update does.

    Args:
        k: Length of the products; where it alone is long, it is cut.
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
    copies = 2 * p["mte_head"] + runs + 2 * depth * (high * left + wide * right)
    loads = p["load_head"] * (high // 16 + 1) + 2 * depth * (high / p["l1_to_l0a_bytes"] + wide / p["l1_to_l0b_bytes"])
    units = (
        share * copies,
        share * (copies + p["l2_read_latency"] + loads) / 2,  # two buffers in turn
        share * loads,
        share * (p["cube_head"] + depth * high * wide / 4096 / p["cube_macs"]),
        stored * (p["mte_head"] + high * p["burst_cycles"] + 4 * high * wide / p["l0c_to_gm_bytes"]),
    )
    busiest, others = max(units), sum(units) - max(units)
    fill = 16 * p["scalar_gm_cycles"] + 2 * p["l2_read_latency"] + p["l2_write_latency"]  # first the tiling is read
    return busiest + fill + EXPOSED["cube", 2] * others + FILL["cube"] * others / share


def panels(num_columns: int, num_groups: int, kernel: Kernel, heads: int = 1) -> tuple[int, int]:
    """Return the columns of the widest group, filled up to blocks of 16, and in how many panels they are handled.

    Args:
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


def _sums(
    rows: Array, entries: Array, width: int, pieces: int, p: Mapping[str, float], row_byte: float, buffers: int,
    look_up: float, exposed: float,
) -> tuple[Array, float]:  # fmt: skip
    """Return the cycles of sums of so many entries for so many rows, and the wait for a list and its first rows.

    Args:
        row_byte: Cycles of a byte of a row of the features.
        buffers: 2 for double buffering, else 1.
        look_up: Cycles in which the scalar unit learns of a row of the result.
    """
    head, flag, latency = p["mte_head"], p["flag_cycles"], p["l2_read_latency"]
    panel = 16 * -(-width // (16 * pieces))
    at_once = rows_at_once(panel)
    groups = pieces * entries / at_once
    repeats = 4 * width / p["vector_bytes"]  # of a row in float32
    # Rounding from and to half goes without waiting for banks, about. Of the rows of a group, which are so many blocks
    # of 32 bytes apart, those that begin half of the 16 groups of banks away from the sum are added without a wait.
    waits = p["bank_cycles"] * (1 - math.gcd(panel // 8, 16) / 16)
    move, add = pieces * p["vector_head"] + repeats, pieces * p["vector_head"] + repeats * (1 + waits)
    cast = groups * p["vector_head"] + repeats * entries
    row = head + 2 * width / pieces * row_byte
    if buffers > 1:  # so many copies are in flight, and each ends so much later
        copies = pieces * entries * max(row, (row + latency) / p["copies_in_flight"])
    else:  # the next group has room once this one is float32
        copies = pieces * entries * row + groups * (latency + 2 * flag) + cast
    units = np.stack([
        pieces * (rows * (look_up + 4 * flag + 8) + 5 * entries) + groups * (4 * flag + 2),
        2 * move * rows + add * entries + cast,
        copies,
        rows * (pieces * head + 2 * width * stored_byte(p)),
    ])  # fmt: skip
    busiest = units.max(0)
    listed = 2 * head + latency + 8 * float(np.minimum(entries, BATCH).max(initial=0)) * list_byte(p)
    first = latency + row * min(at_once, float(entries.max(initial=0)))
    return busiest + exposed * (units.sum(0) - busiest), listed + first


def _vector(
    c: Counts, width: int, pieces: int, p: Mapping[str, float], row_byte: float, buffers: int
) -> tuple[Array, float]:
    """Return the cycles of aggregate_vector in each chunk, and those of a core's start: its first list and rows."""
    look_up = 2 * p["scalar_gm_cycles"] + p["l2_read_latency"] / 4  # four vertices lie in a line of the cache
    exposed = EXPOSED["vector", buffers]
    cycles, waited = _sums(c.rows, c.entries, width, pieces, p, row_byte, buffers, look_up, exposed)
    opened = 27 * p["scalar_gm_cycles"] + 5 * p["l2_read_latency"]  # tiling, ranges, two vertices, the panel
    return cycles + pieces * waited * c.entries / BATCH, pieces * waited + opened


def _cube(
    c: Counts, width: int, pieces: int, p: Mapping[str, float], row_byte: float, unified: bool, buffers: int
) -> tuple[Array, Array]:
    """Return the same for aggregate_cube; half a tile is a vector core's where cores are split."""
    head, vector_head, flag, look_up = p["mte_head"], p["vector_head"], p["flag_cycles"], p["scalar_gm_cycles"]
    latency = p["l2_read_latency"]
    tiles = _tiles(c, unified)
    m, k = 16 * -(-c.rows // 16), 16 * -(-c.columns // 16)
    half = 1 if unified else 2
    lists = pieces * (3 * head * tiles * (2 if unified else 1) + list_byte(p) * (4 * k + 4 * c.entries) / half)
    # So many copies are in flight, and each ends so much later.
    row = head + 2 * width / pieces * row_byte
    row = max(row, (row + latency) / p["copies_in_flight"])
    rows = c.columns / half * pieces * row
    # Words of a row block, of its panels and tiles; a line of the scalar unit's cache holds two row blocks or tiles.
    opened = (1 + tiles) * latency / 2 + (5 + pieces * (3 + 6 * tiles)) * look_up
    scatter = pieces * (1.5 * p["scalar_cycles"] * c.entries + 4 * c.columns) / half + opened
    empty = pieces * (vector_head * tiles + 2 * m * k / half / p["vector_bytes"])
    clean = pieces * tiles * 5 * vector_head + 2 * width * k * (3.125 + p["bank_cycles"]) / half / p["vector_bytes"]
    # The lists of the next tile are asked for once this one's weights are in their places, and its rows once its lists
    # and the rows before them are there. Meanwhile the vector unit cleans those, before it empties the next dense tile.
    dense, gather = scatter + empty, lists + pieces * tiles * (latency + 20 * flag)
    if buffers > 1:
        gather = gather + np.maximum(rows, dense + np.maximum(clean - gather, 0))
    else:
        gather = gather + clean + np.maximum(rows, dense)
    loads = p["load_head"] * (pieces * tiles * m / 16 + k / 16 * -(-width // 128))
    loads += 512 * (pieces * m * k / 256 / p["l1_to_l0a_bytes"] + k * width / 256 / p["l1_to_l0b_bytes"])
    cube = p["cube_head"] * tiles * -(-width // 128) + m * k * width / 4096 / p["cube_macs"]
    issue = opened + pieces * tiles * 40 * flag
    runs = c.runs * (pieces * (3 * look_up + flag) + latency / 4)  # the words of a run stay in the cache for all panels
    tile_bytes = 2 * pieces * m * k + 2 * width * k
    store = pieces * (c.runs * head + (c.rows - c.runs) * p["burst_cycles"])
    if unified:
        to_l1 = p["load_head"] * (pieces * k / 16 + tiles * width / 16) + tile_bytes / p["ub_to_l1_bytes"]
        drain = pieces * vector_head + 4 * m * width / p["l0c_to_ub_bytes"]
        store = store + 2 * width * stored_byte(p) * c.rows
        # The scalar unit asks for no rows while it sends results away, so the last tile of a row block takes longer.
        last = 1 / np.maximum(tiles, 1)
        units = np.stack([issue + scatter, clean + empty, gather, to_l1, loads, cube])
        end = np.zeros_like(units)
        end[0], end[1], end[3] = runs, drain, store
    else:
        moved = 2 * pieces * tiles * head
        # A slot of the workspace is written, read and given back, and there are two: so many tiles may be waiting while
        # the cube core's scalar unit sends results away.
        slot = p["l2_write_latency"] + latency + 2 * p["cross_flag_cycles"]
        last = np.minimum(2 / np.maximum(tiles, 1), 1)
        units = np.stack([
            scatter,
            clean + empty,
            gather,
            moved + tile_bytes / 2 * stored_byte(p),
            (pieces * tiles * slot + 2 * moved + tile_bytes * (stored_byte(p) / 2 + 1 / p["l2_read_bytes"])) / 2,
            issue,
            moved + tile_bytes / p["l2_read_bytes"],
            loads,
            cube,
            store + 2 * width * c.rows * max(1 / p["l2_write_bytes"], 1 / p["l0c_to_gm_bytes"]),
        ])  # fmt: skip
        end = np.zeros_like(units)
        end[5] = runs
    return (1 - last) * units.max(0) + (last * units + end).max(0), (units + end).sum(0)


def _fill(p: Mapping[str, float]) -> float:
    """Return the cycles from the first tile's lists to its results that are no unit's work."""
    return 3 * p["l2_read_latency"] + 2 * p["l2_write_latency"] + p["cross_flag_cycles"]


def list_byte(p: Mapping[str, float]) -> float:
    """Return the cycles of a byte of a list, which is read once."""
    return max(1 / p["hbm_bytes"], 1 / p["l2_read_bytes"])


def stored_byte(p: Mapping[str, float]) -> float:
    """Return the cycles of a byte from UB to global memory."""
    return max(1 / p["l2_write_bytes"], 1 / p["ub_to_gm_bytes"])

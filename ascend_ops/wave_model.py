"""What aggregate_gathered costs on an Ascend chip: waves in which all vector cores gather and all cube cores multiply.

While the cube cores multiply a wave the vector cores gather the next one, and all cores wait for each other in between
(``csrc/aggregate_gathered.cpp``). So a wave takes as long as the slower side, and the first gathering comes on top.
Parameters are those of :mod:`lightning_gnn.ascend_ops.cost_model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gnn.ascend_ops.cost_model import (
    TILE_COLUMNS,
    Counts,
    list_byte,
    panels,
    row_byte,
    stored_byte,
)

Array = npt.NDArray[Any]

BATCH_HALVES, BATCH_ROWS, MOST_HALVES = 8192, 256, 16384
"""Numbers and rows that a vector core gathers at once, and the longest row that it can (host_tiling.h)."""
PICK_FILL = 8
"""A tile is picked where at least this part of its cells holds entries (host_tiling.h)."""
EXPOSED = {"gather": 0.1, "multiply": 0.08}
"""Part of the cycles of all but the busiest unit that nothing hides."""
FILL = 1.0
"""Part of a tile's or a batch's such cycles that a core waits at the beginning and the end of each wave."""


@dataclass(frozen=True, eq=False)
class Waves:
    """Cycles of an aggregation by aggregate_gathered.

    Args:
        cycles: Of all of it.
        gather: Of the vector cores in each wave.
        multiply: Of the slowest cube core in each wave.
        imbalance: Cycles of the slowest cube cores over the mean of all.
        copies: Copies of the features' rows.
        dense_bytes: Of the dense tiles, where they are kept.
    """

    cycles: float
    gather: Array
    multiply: Array
    imbalance: float
    copies: float
    dense_bytes: float


def cut_waves(counts: Counts, number: int) -> Array:
    """Cut chunks into waves that gather about as many rows each: int64 ``[number + 1]``, fewer where some are empty.

    The first is a quarter of the others, for nothing is multiplied while it is gathered.
    """
    ends = np.cumsum(_up(counts.columns))
    total = ends[-1] if ends.size else 0
    inner = np.searchsorted(ends, total * (np.arange(1, number) - 0.75) / (number - 0.75), "left") + 1
    return np.unique(np.concatenate([[0], inner.clip(max=ends.size), [ends.size]]))


def slot_bytes(counts: Counts, num_columns: int, bounds: Array, heads: int, kept: bool) -> int:
    """Return the bytes of the larger of the two buffers: rows of a wave, and its dense tiles if they are not kept."""
    rows = np.diff(np.concatenate([[0], np.cumsum(_up(counts.columns))])[bounds])
    tiles = np.diff(np.concatenate([[0], np.cumsum(_cells(counts))])[bounds])
    width = heads * 16 * -(-num_columns // heads // 16)
    return int(2 * (rows * width + (0 if kept else heads * tiles)).max(initial=0))


def gathered_cycles(
    counts: Counts,
    num_columns: int,
    num_groups: int,
    num_members: int,
    bounds: Array,
    kept: bool,
    chip: Mapping[str, float],
    heads: int = 1,
) -> Waves:
    """Return the cycles of an aggregation.

    Args:
        counts: Of chunks of at most 128 rows.
        num_members: G; there are M G cube cores and twice as many vector cores.
    """
    wave = np.repeat(np.arange(bounds.size - 1), np.diff(bounds))
    waves, cores = bounds.size - 1, 2 * num_groups * num_members

    def of_waves(values: Array) -> Array:
        return np.bincount(wave, values, waves)

    runs = counts.column_runs + (counts.columns % 16 > 0)
    gather, copies = _rows(counts, num_columns, heads, chip, cores, of_waves, runs)
    if not kept:
        gather = gather + _parts(counts, heads, chip, cores, of_waves)
    each, first = _multiplied(counts, num_columns, num_groups, kept, chip, heads)
    # The share in which the middle of a chunk lies, as host_gathered.cpp deals them out.
    weight = _up(counts.columns).astype(float) * (_up(counts.rows) + 16)
    total = of_waves(weight)
    before = np.cumsum(weight) - weight
    middle = before - np.concatenate([[0.0], np.cumsum(total)])[wave] + weight / 2
    member = np.minimum(middle * num_members // np.maximum(total[wave], 1), num_members - 1).astype(np.int64)
    shares = np.bincount(wave * num_members + member, each, waves * num_members)
    multiply = shares.reshape(waves, num_members).max(1) + first
    cycles = np.maximum(np.append(gather, 0.0), np.insert(multiply, 0, 0.0)).sum() + waves * chip["sync_all_cycles"]
    imbalance = multiply.sum() * num_members / max(each.sum(), 1.0)
    dense_bytes = 2.0 * heads * float(_cells(counts).sum()) if kept else 0.0
    return Waves(float(cycles), gather, multiply, float(imbalance), copies, dense_bytes)


def _rows(
    c: Counts, num_columns: int, heads: int, p: Mapping[str, float], cores: int, of_waves: Any, runs: Array
) -> tuple[Array, float]:
    """Return the cycles in which the busiest vector core gathers its share of each wave's rows, and all copies."""
    width = heads * 16 * -(-num_columns // heads // 16)
    fits = min(128 * -(-max(width, BATCH_HALVES) // 128) // width, BATCH_ROWS)
    rows = of_waves(_up(c.columns))
    batches = -(-rows // fits)
    copies = of_waves(runs) + batches
    share = -(-batches // cores) / np.maximum(batches, 1)  # of the core that has one batch more than others
    head, flag, look_up, latency = p["mte_head"], p["flag_cycles"], p["scalar_gm_cycles"], p["l2_read_latency"]
    moved = 2 * width * rows
    copied = head * copies + 2 * width * of_waves(c.columns) * row_byte("gathered", c, num_columns, p)
    # So many copies are in flight, and each ends so much later.
    copied = np.maximum(copied, (copied + latency * copies) / p["copies_in_flight"])
    units = share * np.stack([
        batches * (7 * look_up + latency / 2 + 22 * flag) + 4 * copies,
        batches * 8 * p["vector_head"] + (3.125 + p["bank_cycles"]) * moved / p["vector_bytes"],
        head * batches + 8 * copies * list_byte(p) + copied,
        head * batches + moved * stored_byte(p),
    ])  # fmt: skip
    busiest = units.max(0)
    others = units.sum(0) - busiest
    # The last batch of a wave is cleaned and sent when nothing else is left to do.
    last = FILL * others / np.maximum(share * batches, 1) + 2 * latency + p["l2_write_latency"]
    return busiest + EXPOSED["gather"] * others + last, float(copies.sum())


def _parts(c: Counts, heads: int, p: Mapping[str, float], cores: int, of_waves: Any) -> Array:
    """Return the cycles in which the busiest vector core makes its share of each wave's tiles dense."""
    cells = _cells(c).astype(float)
    picked = PICK_FILL * c.entries >= cells
    parts = 2 * heads * of_waves(_tiles(c))
    share = -(-parts // cores) / np.maximum(parts, 1)
    pieces = heads * of_waves(np.where(picked, np.maximum(cells / 2048, 2 * _tiles(c)), 0))
    full = heads * of_waves(np.where(picked, cells, 0))
    thin, entries = (heads * of_waves(np.where(picked, 0, values)) for values in (cells, c.entries))
    head, flag, look_up, latency = p["mte_head"], p["flag_cycles"], p["scalar_gm_cycles"], p["l2_read_latency"]
    units = share * np.stack([
        parts * (7 * look_up + 1.5 * latency + 20 * flag) + 12 * flag * pieces + 1.5 * p["scalar_cycles"] * entries,
        # Gathering takes a block of UB for each element; two casts come before.
        4 * p["vector_head"] * (parts + pieces) + (32 + 8) * full / p["vector_bytes"] + 2 * thin / p["vector_bytes"],
        (head + latency) * parts + head * (parts + pieces) + list_byte(p) * (4 * entries + 2 * full),
        head * (parts + pieces) + 2 * (full + thin) * stored_byte(p),
    ])  # fmt: skip
    # A tile's entries, their stores and its copy follow one another: little of it is side by side.
    return np.asarray(units.max(0) + 0.3 * (units.sum(0) - units.max(0)))


def _multiplied(
    c: Counts, num_columns: int, num_groups: int, kept: bool, p: Mapping[str, float], heads: int
) -> tuple[Array, float]:
    """Return the cycles of a cube core for each chunk and the widest group, and what a tile takes at either end."""
    width, pieces = panels(num_columns, num_groups, "gathered", heads)
    tiles, m, k = _tiles(c), _up(c.rows), _up(c.columns)
    head, flag, look_up, latency = p["mte_head"], p["flag_cycles"], p["scalar_gm_cycles"], p["l2_read_latency"]
    cold = list_byte(p) - 1 / p["l2_read_bytes"]
    strided = (k - tiles) * p["burst_cycles"] * pieces if pieces * num_groups > 1 else 0
    runs = pieces * c.runs
    copies = 2 * pieces * tiles * head + strided + (2 * pieces * m * k + 2 * width * k) / p["l2_read_bytes"]
    loads = p["load_head"] * (pieces * tiles * m / 16 + k / 16 * -(-width // 128))
    loads += 512 * (pieces * m * k / 256 / p["l1_to_l0a_bytes"] + k * width / 256 / p["l1_to_l0b_bytes"])
    units = np.stack([
        pieces * tiles * (8 * look_up + 40 * flag) + (tiles + 1) * latency
        + runs * (3 * look_up + flag) + c.runs * latency / 4,
        copies,
        loads,
        (copies + pieces * tiles * latency + loads) / 2,  # two buffers in turn
        p["cube_head"] * tiles * -(-width // 128) + m * k * width / 4096 / p["cube_macs"],
        runs * head + pieces * (c.rows - c.runs) * p["burst_cycles"]
        + 2 * width * c.rows * max(1 / p["l2_write_bytes"], 1 / p["l0c_to_gm_bytes"]),
    ])  # fmt: skip
    busiest = units.max(0)
    if kept:
        # A tile comes from global memory for the first panel of each head, and from L2 for the others.
        first_panels = max(heads / num_groups, 1) / pieces
        cold_units = first_panels * units
        cold_units[[1, 3]] += 2 * max(heads / num_groups, 1) * m * k * cold * np.array([[1], [0.5]])
        busiest = (1 - first_panels) * busiest + cold_units.max(0)
        units[1] += 2 * max(heads / num_groups, 1) * m * k * cold
    others = units.sum(0) - units[3] - np.minimum(busiest, units.sum(0) - units[3])
    first = FILL * float(others.sum()) / max(float((pieces * tiles).sum()), 1.0)
    first += 3 * latency + p["l2_write_latency"]
    return np.asarray(busiest + EXPOSED["multiply"] * others), first


def _up(values: Array) -> Array:
    return np.asarray(16 * -(-values // 16))


def _tiles(c: Counts) -> Array:
    return np.asarray(-(-c.columns // TILE_COLUMNS))


def _cells(c: Counts) -> Array:
    return _up(c.rows) * _up(c.columns)

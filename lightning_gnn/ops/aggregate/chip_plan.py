"""Who computes what of an aggregation on an Ascend chip: order, height of the chunks, groups and kernel, by one model.

Every group of columns gathers every row again, so a plan is judged by the rows that it loads and the copies that it
issues (:mod:`lightning_gnn.ascend_ops.cost_model`): ranges of chunks take equally many modelled cycles, and of all
combinations the one whose slowest worker is done first is taken. One group is always among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from lightning_gnn.ascend_ops.cost_model import Counts, Kernel, chunk_cycles, hbm_bytes, panels, rows_copied
from lightning_gnn.ascend_ops.wave_model import MOST_HALVES, cut_waves, gathered_cycles, slot_bytes
from lightning_gnn.graph.chunks import Chunks, count_column_runs, count_columns
from lightning_gnn.graph.hybrid_plan import (
    BLOCK,
    GroupingCost,
    HybridPlan,
    PlanSettings,
    balance_ranges,
    check_groups,
    check_sizes,
    divisors,
    max_over_mean,
    slice_columns,
)

Array = npt.NDArray[Any]

HEIGHTS: dict[Kernel, tuple[int, ...]] = {"cube": (16, 32, 64, 128), "gathered": (16, 32, 64, 128), "vector": (8,)}
"""Rows of a chunk. To the cube they are rows of its tiles; to the vector kernel chunks are but where ranges may end."""
WAVES = 6
"""How many numbers of waves are considered, each twice the one before."""
KEPT_BYTES = 2**32
"""Dense tiles that are kept may take so much of an NPU's memory."""


def plan_chip(
    num_columns: int,
    orders: Mapping[str, Chunks],
    settings: PlanSettings,
    cores: int,
    chip: Mapping[str, float],
    *,
    kernels: Sequence[Kernel] = ("cube", "vector"),
    buffers: int = 2,
    heads: int = 1,
    static: bool = False,
) -> HybridPlan:
    """Plan one aggregation on the cores of an Ascend chip, for one layer and direction.

    Args:
        num_columns: D, columns of the features.
        orders: The direction's chunks, by the name of the order of their rows; the heights of the chunks do not matter.
        settings: The number of groups, where it is given.
        cores: AI cores: workers of the cube kernel. Those of the vector kernel are twice as many on split cores.
        static: Weights never change, or there are none: dense tiles may be kept.

    Returns:
        The plan with kernel, order and height; its ranges are of chunks cut to that height. ``candidates`` has the best
        of each number of groups.
    """
    check_sizes(num_columns, cores)
    best: dict[int, HybridPlan] = {}
    costs: dict[int, GroupingCost] = {}
    for kernel, order, height, counts in _cuts(orders, kernels):
        workers = cores * (2 if kernel == "vector" and not chip.get("ub_to_l1_bytes") else 1)
        supply = hbm_bytes(kernel, counts, num_columns, chip) / hbm_rate(chip)
        for num_groups in _groups(num_columns, workers, settings):
            if kernel == "gathered":
                found = _in_waves(num_columns, num_groups, workers, counts, chip, heads, static, supply)
            else:
                found = _in_ranges(kernel, num_columns, num_groups, workers, counts, chip, heads, buffers, supply)
            for cost, terms, ranges, how in found:
                if num_groups in costs and cost >= costs[num_groups].cost:
                    continue
                notes = [kernel, f"{height} rows a chunk", *([order] if order else [])]
                if how:
                    notes += [f"{len(how['waves']) - 1} waves", *(["tiles kept"] if how["kept"] else [])]
                costs[num_groups] = GroupingCost(num_groups, cost, terms, ", ".join(notes))
                best[num_groups] = HybridPlan(
                    num_workers=workers,
                    num_groups=num_groups,
                    num_columns=num_columns,
                    slices=slice_columns(num_columns, num_groups),
                    chunk_ranges=ranges,
                    loads=tuple(int(counts.entries[first:stop].sum()) for first, stop in ranges),
                    unit="cycles, modelled",
                    kernel=kernel,
                    height=height,
                    order=order,
                    **how,
                )
    chosen = min(costs.values(), key=lambda candidate: (candidate.cost, candidate.num_groups))
    listed = tuple(costs[num_groups] for num_groups in sorted(costs))
    return replace(best[chosen.num_groups], candidates=listed)


Found = tuple[float, dict[str, float], tuple[tuple[int, int], ...], dict[str, Any]]
"""Cost, its terms, ranges of chunks, and what else the plan says."""


def _in_ranges(
    kernel: Kernel, num_columns: int, num_groups: int, workers: int, counts: Counts, chip: Mapping[str, float],
    heads: int, buffers: int, supply: float,
) -> Iterator[Found]:  # fmt: skip
    cycles, start = chunk_cycles(kernel, counts, num_columns, num_groups, chip, buffers, heads)
    loads = np.ceil(cycles).astype(np.int64)
    ranges = balance_ranges(loads, workers // num_groups)
    by_range = np.array([loads[first:stop].sum() for first, stop in ranges])
    loaded = int(rows_copied(kernel, counts).sum()) * num_groups
    _, pieces = panels(num_columns, num_groups, kernel, heads)
    terms = {"rows loaded": float(loaded), "copies": float(loaded * pieces), "imbalance": max_over_mean(by_range)}
    yield max(float(by_range.max()) + start, supply), terms, ranges, {}


def _in_waves(
    num_columns: int, num_groups: int, workers: int, counts: Counts, chip: Mapping[str, float], heads: int,
    static: bool, supply: float,
) -> Iterator[Found]:  # fmt: skip
    if counts.rows.size == 0 or heads * 16 * -(-num_columns // heads // 16) > MOST_HALVES:
        return
    members = workers // num_groups
    for kept in (False, True) if static else (False,):
        whole = slot_bytes(counts, num_columns, np.array([0, counts.rows.size]), heads, kept)
        # Both buffers together in half of L2.
        fewest = max(1, -(-4 * whole // int(chip["l2_bytes"])))
        for number in dict.fromkeys(min(fewest << step, counts.rows.size) for step in range(WAVES)):
            bounds = cut_waves(counts, number)
            found = gathered_cycles(counts, num_columns, num_groups, members, bounds, kept, chip, heads)
            if found.dense_bytes > KEPT_BYTES:
                return
            more = found.dense_bytes / hbm_rate(chip)
            terms = {
                "rows loaded": float(counts.columns.sum()), "copies": found.copies, "imbalance": found.imbalance,
            }  # fmt: skip
            ranges = balance_ranges(counts.columns, members)
            how = {"waves": tuple(map(int, bounds)), "kept": kept}
            yield max(found.cycles, supply + more), terms, ranges, how


def hbm_rate(chip: Mapping[str, float]) -> float:
    """Return the bytes a cycle that HBM delivers to all cores together."""
    return chip["hbm_gb_s"] * 1e3 / chip["clock_mhz"] if "hbm_gb_s" in chip else float("inf")


_counted: WeakKeyDictionary[Chunks, dict[int, Counts]] = WeakKeyDictionary()


def count_chunks(chunks: Chunks, height: int) -> Counts:
    """Count what chunks of ``height`` rows hold; kept as long as the chunks."""
    known = _counted.setdefault(chunks, {})
    if height not in known:
        known[height] = _count(chunks, height)
    return known[height]


def _count(chunks: Chunks, height: int) -> Counts:
    offsets, rows = chunks.indptr.cpu().numpy(), chunks.rows.cpu().numpy()
    columns = chunks.entry_columns().cpu().numpy()
    starts: Array = np.arange(0, rows.size, height)
    degrees = np.diff(offsets)
    used = degrees > 0
    # A row continues the run of the one before it where its vertex is the next.
    begins = used.copy()
    begins[1:] &= ~((np.diff(rows) == 1) & used[:-1])
    begins[starts] = used[starts]

    def per_chunk(values: Array) -> Array:
        return np.add.reduceat(values.astype(np.int64), starts) if starts.size else np.zeros(0, np.int64)

    cut = columns, offsets[:-1], offsets[1:], np.append(starts, rows.size), chunks.num_columns
    return Counts(
        rows=per_chunk(used),
        entries=per_chunk(degrees),
        columns=np.diff(count_columns(*cut)),
        runs=per_chunk(begins),
        column_runs=count_column_runs(*cut),
        num_sources=int(np.unique(columns).size),
    )


def _cuts(orders: Mapping[str, Chunks], kernels: Sequence[Kernel]) -> Iterator[tuple[Kernel, str, int, Counts]]:
    for order, chunks in orders.items():
        for kernel in kernels:
            for height in HEIGHTS[kernel]:
                yield kernel, order, height, count_chunks(chunks, height)


def _groups(num_columns: int, workers: int, settings: PlanSettings) -> list[int]:
    if settings.num_groups != "auto":
        check_groups(settings.num_groups, workers, num_columns)
        return [settings.num_groups]
    return [groups for groups in divisors(workers) if groups <= -(-num_columns // BLOCK)]

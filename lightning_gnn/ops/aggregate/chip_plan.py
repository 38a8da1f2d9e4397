"""Plans aggregations on an Ascend chip, minimizing the estimated cycles of the slowest worker."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from lightning_gnn.compressed.chunks import Chunks, count_columns
from lightning_gnn.compressed.hybrid_plan import (
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
Kernel = Literal["cube", "vector"]

HEIGHT: dict[str, int] = {"cube": 128, "vector": 8}  # rows per chunk: cube tiles, or the granularity of vector ranges
PANEL = {"cube": 256, "vector": 2048}  # columns of the features that a kernel handles at once (host_tiling.h)
TILE_COLUMNS = 128  # columns of a dense tile


@dataclass(frozen=True, eq=False)
class Counts:
    """Statistics of the chunks of one direction of a graph; each array is ``[num_chunks]``."""

    rows: Array  # rows that have entries
    entries: Array
    columns: Array  # distinct columns: feature rows that the cube kernel loads
    runs: Array  # runs of rows with contiguous results


def plan_chip(
    num_columns: int,
    chunks: Chunks,  # one direction of the graph, with chunks of any height
    settings: PlanSettings,  # may fix the number of groups
    cores: int,  # AI cores: workers of the cube kernel; the vector kernel has twice as many
    *,
    kernels: Sequence[Kernel] = ("cube", "vector"),
    heads: int = 1,
) -> HybridPlan:
    """Plan one layer and direction; ranges count chunks of ``HEIGHT[kernel]`` rows; a candidate per ``num_groups``."""
    check_sizes(num_columns, cores)
    best: dict[int, HybridPlan] = {}
    costs: dict[int, GroupingCost] = {}
    for kernel in kernels:
        counts = count_chunks(chunks, HEIGHT[kernel])
        workers = cores * (2 if kernel == "vector" else 1)
        for num_groups in _candidate_groups(num_columns, workers, settings):
            cycles = estimate_cycles(kernel, counts, num_columns, num_groups, heads)
            ranges = balance_ranges(cycles, workers // num_groups)
            by_range = np.array([cycles[first:stop].sum() for first, stop in ranges])
            cost = float(by_range.max())
            if num_groups in costs and cost >= costs[num_groups].cost:
                continue
            loaded = float((counts.entries if kernel == "vector" else counts.columns).sum() * num_groups)
            terms = {"rows loaded": loaded, "imbalance": max_over_mean(by_range)}
            costs[num_groups] = GroupingCost(num_groups, cost, terms, kernel)
            best[num_groups] = HybridPlan(
                num_workers=workers,
                num_groups=num_groups,
                num_columns=num_columns,
                slices=slice_columns(num_columns, num_groups),
                chunk_ranges=ranges,
                loads=tuple(int(counts.entries[first:stop].sum()) for first, stop in ranges),
                unit="cycles, estimated",
                kernel=kernel,
            )
    chosen = min(costs.values(), key=lambda candidate: (candidate.cost, candidate.num_groups))
    return replace(best[chosen.num_groups], candidates=tuple(costs[num_groups] for num_groups in sorted(costs)))


def estimate_cycles(kernel: Kernel, counts: Counts, num_columns: int, num_groups: int, heads: int = 1) -> Array:
    """Estimate the cycles of each chunk on a worker of the widest group, by the twin's ``cost.h``, int64."""
    # Each head has its own weights and covers whole blocks of columns; a panel belongs to a single head.
    blocks = heads * -(-num_columns // heads // BLOCK)
    width = BLOCK * -(-blocks // num_groups)
    panels = max(-(-width // PANEL[kernel]), -(-heads // num_groups))
    rows, entries, columns = counts.rows, counts.entries, counts.columns
    if kernel == "vector":
        # The scalar unit looks up rows and requests entries while the vector unit starts sums and accumulates entries.
        busiest = np.maximum(116 * rows + 5 * entries, 47 * rows + 26 * entries)
        return np.asarray(panels * busiest + width * (3 * entries + 2 * rows) // 64)
    tiles = np.maximum(-(-columns // TILE_COLUMNS), 1)
    gather = panels * (10 * columns + 300 * tiles) + width * columns // 100
    # Results are stored run by run while the next two tiles are gathered; the buffers hold no more than two.
    store = counts.runs * (64 * panels + 64)
    return np.asarray(np.maximum(gather, gather * np.maximum(tiles - 2, 0) // tiles + store))


_count_cache: WeakKeyDictionary[Chunks, dict[int, Counts]] = WeakKeyDictionary()


def count_chunks(chunks: Chunks, height: int) -> Counts:
    """Return statistics of chunks of ``height`` rows, cached for the lifetime of ``chunks``."""
    by_height = _count_cache.setdefault(chunks, {})
    if height not in by_height:
        by_height[height] = _count(chunks, height)
    return by_height[height]


def _count(chunks: Chunks, height: int) -> Counts:
    offsets, rows = chunks.indptr.cpu().numpy(), chunks.rows.cpu().numpy()
    columns = chunks.entry_columns().cpu().numpy()
    starts: Array = np.arange(0, rows.size, height)
    degrees = np.diff(offsets)
    used = degrees > 0
    # A row continues the run of the previous row if its vertex is the next one.
    begins = used.copy()
    begins[1:] &= ~((np.diff(rows) == 1) & used[:-1])
    begins[starts] = used[starts]

    def per_chunk(values: Array) -> Array:
        return np.add.reduceat(values.astype(np.int64), starts) if starts.size else np.zeros(0, np.int64)

    ends = np.append(starts, rows.size)
    return Counts(
        rows=per_chunk(used),
        entries=per_chunk(degrees),
        columns=np.diff(count_columns(columns, offsets[:-1], offsets[1:], ends, chunks.num_columns)),
        runs=per_chunk(begins),
    )


def _candidate_groups(num_columns: int, workers: int, settings: PlanSettings) -> list[int]:
    if settings.num_groups != "auto":
        check_groups(settings.num_groups, workers, num_columns)
        return [settings.num_groups]
    return [groups for groups in divisors(workers) if groups <= -(-num_columns // BLOCK)]

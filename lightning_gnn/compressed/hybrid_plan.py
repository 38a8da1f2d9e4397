"""Plans tensor-data hybrid parallelism (NeutronAscend, section 5): the columns and chunks of each worker."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning_gnn.runtime.messages import aligned

BLOCK = 16
"""Columns of a block: the cube unit computes tiles of 16 x 16, and 16 float16 values are an aligned 32 bytes."""


@dataclass(frozen=True)
class PlanSettings:
    """Settings of a plan that do not follow from the graph and the features."""

    num_workers: int | None = None  # N, cores or threads; None: the executor decides
    num_groups: int | Literal["auto"] = "auto"  # M, which divides N, or "auto"
    bandwidth_ratio: float = 20  # r, bandwidth of the shared cache relative to global memory; at least 1
    grouping: Literal["balanced", "paper"] = "balanced"
    """``"balanced"`` uses the cost of chunks in the kernels; ``"paper"`` is algorithm 1, which always chooses M = 1."""
    chunks: Literal["balanced", "paper"] = "balanced"
    """Chunks of an NPU: ``"balanced"`` fills quotas or keeps the order of ids, ``"paper"`` is algorithm 2 literally."""

    def __post_init__(self) -> None:
        if isinstance(self.num_groups, str) and self.num_groups != "auto":
            raise ValueError(f"num_groups must be a number or 'auto', but is {self.num_groups!r}")
        for name in ("num_workers", "num_groups", "bandwidth_ratio"):
            value = getattr(self, name)
            if value not in (None, "auto") and not value >= 1:
                raise ValueError(f"{name} must be at least 1, but is {value}")
        for name in ("grouping", "chunks"):
            if getattr(self, name) not in ("balanced", "paper"):
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use 'balanced' or 'paper'")


@dataclass(frozen=True)
class GroupingCost:
    """Estimated cost of one number of groups."""

    num_groups: int
    cost: float
    terms: Mapping[str, float]  # parts of the cost by name, in the order of the table
    note: str = ""  # reason why it cannot be chosen, or empty


@dataclass(frozen=True)
class HybridPlan:
    """N workers in M groups of G = N / M: worker ``i`` is member ``i // M`` of group ``i % M`` (section 5)."""

    num_workers: int  # N: cores, threads or ranks
    num_groups: int
    num_columns: int  # D, columns of the features
    slices: tuple[tuple[int, int], ...]
    """Columns of each group, M consecutive pairs ``(start, stop)``, none empty."""
    chunk_ranges: tuple[tuple[int, int], ...]
    """Chunks of each member, G consecutive pairs ``(start, stop)``; some may be empty."""
    loads: tuple[int, ...]  # edges of each member's chunks, [G]
    candidates: tuple[GroupingCost, ...] = ()  # estimated cost of each number of groups, in ascending order of M
    unit: str = ""  # unit of the candidates' costs
    kernel: str = ""  # NPU kernel that executes the plan, "cube" or "vector"; empty elsewhere

    @property
    def group_size(self) -> int:
        """G, the number of members of a group."""
        return self.num_workers // self.num_groups

    def worker(self, index: int) -> tuple[int, int]:
        """Return the group m and the member g of a worker."""
        if not 0 <= index < self.num_workers:
            raise IndexError(f"worker must be from 0 to {self.num_workers - 1}, but is {index}")
        return index % self.num_groups, index // self.num_groups

    @property
    def work(self) -> np.ndarray:
        """Multiply-adds of each worker, its edges times its columns, int64 ``[N]``."""
        widths = np.array([stop - start for start, stop in self.slices], np.int64)
        return (np.array(self.loads, np.int64)[:, None] * widths).reshape(-1)

    @property
    def balance(self) -> float:
        """Maximum work of a worker divided by the mean: 1 is perfect."""
        return max_over_mean(self.work)

    def __str__(self) -> str:
        """Return the plan as a table."""
        lines = [
            f"{self.num_workers} workers = {self.num_groups} groups x {self.group_size} members, "
            f"{self.num_columns} columns, {sum(self.loads)} edges",
            "",
        ]
        rows: list[list[str]] = [["worker", "group", "member", "columns", "chunks", "edges", "work"]]
        for index, work in enumerate(self.work):
            group, member = self.worker(index)
            (start, stop), (first, last) = self.slices[group], self.chunk_ranges[member]
            cells = (index, group, member, f"{start}:{stop}", f"{first}:{last}", self.loads[member], work)
            rows.append([str(cell) for cell in cells])
        padded = padding(self.num_columns, self.num_groups)
        lines += [*aligned(rows), f"work, max/mean: {self.balance:.3f}; columns padded by {padded - 1:.1%}"]
        if self.candidates:
            terms = list(self.candidates[0].terms)
            rows = [["groups", *terms, "cost", ""]]
            for candidate in self.candidates:
                numbers = [*(candidate.terms[term] for term in terms), candidate.cost]
                chosen = ["chosen"] if candidate.num_groups == self.num_groups else []
                note = " ".join([*chosen, candidate.note]).strip()
                rows.append([str(candidate.num_groups), *(f"{number:.4g}" for number in numbers), note])
            lines += ["", *aligned(rows), f"cost in {self.unit}" if self.unit else ""]
        return "\n".join(lines).rstrip()


def plan_cores(num_columns: int, chunk_loads: npt.ArrayLike, settings: PlanSettings, num_workers: int) -> HybridPlan:
    """Plan one aggregation on the cores of one device by algorithm 1, as published: the M with the lowest cost.

    For every M that divides N, with S = ceil(D / M) and G = N / M, the cost is ``T_idle - T_saved`` (section 5.3):

    - ``T_idle = T_comp * (16 * ceil(S / 16) * M / D - 1)``, padding of the cube unit; the paper's if M divides D;
    - ``T_saved = T_mem * (1 - 1 / (1 + (G - 1) * (r - 1)))``, the reads that the shared cache serves.
    """
    check_sizes(num_columns, num_workers)
    loads = check_loads(chunk_loads)
    # Loading a float32 takes as long as one multiply-add.
    t_comp = t_mem = int(loads.sum()) * num_columns / num_workers
    # Compare all valid numbers of groups.
    if settings.num_groups == "auto":
        considered = [groups for groups in divisors(num_workers) if groups <= num_columns]
    else:
        check_groups(settings.num_groups, num_workers, num_columns)
        considered = [settings.num_groups]
    candidates = []
    for num_groups in considered:
        idle = t_comp * (padding(num_columns, num_groups) - 1)
        others = num_workers // num_groups - 1
        saved = t_mem * (1 - 1 / (1 + others * (settings.bandwidth_ratio - 1)))
        candidates.append(GroupingCost(num_groups, idle - saved, {"T_idle": idle, "T_saved": saved}))
    best = min(candidates, key=lambda candidate: candidate.cost).num_groups
    ranges = balance_ranges(loads, num_workers // best)
    return HybridPlan(
        num_workers=num_workers,
        num_groups=best,
        num_columns=num_columns,
        slices=slice_columns(num_columns, best),
        chunk_ranges=ranges,
        loads=tuple(int(loads[start:stop].sum()) for start, stop in ranges),
        candidates=tuple(candidates),
        unit="multiply-adds of one worker",
    )


def slice_columns(num_columns: int, num_groups: int) -> tuple[tuple[int, int], ...]:
    """Split columns among M groups into pairs ``(start, stop)``: in whole blocks of 16 if there are at least M."""
    # Either way the widest slice, padded to blocks, has 16 * ceil(ceil(D / M) / 16) columns.
    num_blocks = -(-num_columns // BLOCK)
    unit, count = (BLOCK, num_blocks) if num_blocks >= num_groups else (1, num_columns)
    size, rest = divmod(count, num_groups)
    # The larger slices come last if units are blocks, first if they are single columns (as in tensor_split).
    larger = range(num_groups - rest, num_groups) if unit == BLOCK else range(rest)
    bounds = [0]
    for group in range(num_groups):
        bounds.append(bounds[-1] + (size + (group in larger)) * unit)
    bounds[-1] = num_columns
    return tuple(pairwise(bounds))


def padding(num_columns: int, num_groups: int) -> float:
    """Return ``16 * ceil(S / 16) * M / D`` with S = ceil(D / M): 1 if every slice consists of whole blocks."""
    widest = -(-num_columns // num_groups)
    return BLOCK * -(-widest // BLOCK) * num_groups / num_columns


def divisors(number: int) -> list[int]:
    """Return the divisors in ascending order."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def max_over_mean(values: np.ndarray) -> float:
    """Return the maximum divided by the mean; 1 if the sum is 0."""
    total = int(np.sum(values))
    return int(np.max(values)) * len(values) / total if total else 1.0


def check_groups(num_groups: int, num_workers: int, num_columns: int) -> None:
    """Raise a ValueError unless the number of groups is valid for these workers and columns."""
    if num_groups < 1:
        raise ValueError(f"num_groups must be at least 1, but is {num_groups}")
    if num_workers % num_groups:
        choices = ", ".join(map(str, divisors(num_workers)))
        raise ValueError(f"num_groups={num_groups} does not divide the {num_workers} workers; use one of {choices}")
    if num_groups > num_columns:
        narrow = f"features narrower than the groups: {num_columns} columns for num_groups={num_groups}"
        raise ValueError(f"{narrow}; use num_groups='auto' or at most {num_columns}")


def check_sizes(num_columns: int, num_workers: int) -> None:
    """Raise a ValueError unless both sizes are positive."""
    if num_columns < 1:
        raise ValueError(f"num_columns must be at least 1, but is {num_columns}")
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, but is {num_workers}")


def balance_ranges(loads: npt.ArrayLike, parts: int) -> tuple[tuple[int, int], ...]:
    """Split loads ``[num_items]`` into contiguous ranges ``(start, stop)``, minimizing the maximum load."""
    loads = check_loads(loads)
    if parts < 1:
        raise ValueError(f"parts must be at least 1, but is {parts}")
    num_items = loads.size
    if num_items <= parts:
        bounds = [min(part, num_items) for part in range(parts + 1)]
    else:
        if not loads.any():
            loads = np.ones_like(loads)  # balance the number of items instead
        # Find the least possible maximum; within it, give each range about an even share of the remaining load.
        prefix: np.ndarray = np.concatenate([[0], np.cumsum(loads)])
        bounds = _choose_bounds(prefix, parts, _find_least_maximum(prefix, int(loads.max()), parts))
    return tuple(pairwise(bounds))


def check_loads(loads: npt.ArrayLike) -> np.ndarray:
    """Validate loads and return them as int64 ``[num_items]``."""
    loads = np.asarray(loads)
    if loads.ndim != 1:
        raise ValueError(f"loads must have one dimension, but have the shape {list(loads.shape)}")
    if loads.size and not np.issubdtype(loads.dtype, np.integer):
        raise TypeError(f"loads must be whole numbers (edges), but are {loads.dtype}")
    if loads.size and loads.min() < 0:
        at = int(loads.argmin())
        raise ValueError(f"loads must not be negative, but loads[{at}] = {int(loads[at])}")
    return loads.astype(np.int64)


def _find_least_maximum(prefix: np.ndarray, heaviest: int, parts: int) -> int:
    """Return the minimal maximum load of ``parts`` ranges, by binary search."""
    low = max(-(-int(prefix[-1]) // parts), heaviest)
    high = low + heaviest  # a greedy cut at the mean overshoots by less than one item
    while low < high:
        middle = (low + high) // 2
        if _can_split(prefix, middle, parts):
            high = middle
        else:
            low = middle + 1
    return low


def _can_split(prefix: np.ndarray, limit: int, parts: int) -> bool:
    start, end = 0, prefix.size - 1
    for _ in range(parts):
        start = _find_last_stop(prefix, start, limit)
        if start == end:
            return True
    return False


def _find_last_stop(prefix: np.ndarray, start: int, limit: int) -> int:
    """Return the last stop of a range from ``start`` with a load of at most ``limit``."""
    return int(np.searchsorted(prefix, prefix[start] + limit, side="right")) - 1


def _choose_bounds(prefix: np.ndarray, parts: int, limit: int) -> list[int]:
    """Return bounds of nearly even, non-empty ranges of at most ``limit``; needs more items than parts."""
    end = prefix.size - 1
    earliest = [0] * parts + [end]  # first bound from which the remaining ranges can take the remaining items
    for part in range(parts - 1, 0, -1):
        earliest[part] = int(np.searchsorted(prefix, prefix[earliest[part + 1]] - limit, side="left"))
    bounds = [0]
    for part in range(1, parts):
        done = int(prefix[bounds[-1]])
        share = done + (int(prefix[-1]) - done) // (parts - part + 1)
        near = int(np.searchsorted(prefix, share, side="left"))
        if near and share - prefix[near - 1] < prefix[near] - share:
            near -= 1
        low = max(earliest[part], bounds[-1] + 1)
        high = min(_find_last_stop(prefix, bounds[-1], limit), end - (parts - part))
        bounds.append(min(max(near, low), high))
    return [*bounds, end]

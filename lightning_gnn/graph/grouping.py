"""Cost-effective grouping of the cores of one device: how many groups share out the columns (algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning_gnn.graph.hybrid_plan import (
    GroupingCost,
    HybridPlan,
    check_groups,
    check_sizes,
    divisors,
    max_over_mean,
    padding,
    slice_columns,
)
from lightning_gnn.graph.ranges import balance_ranges, check_loads

TOLERATED = 1.05
"""Up to this multiple of the least possible, the slowest worker's work (padding included) counts as balanced."""
_BYTES_PER_MULTIPLY_ADD = 4


@dataclass(frozen=True)
class PlanSettings:
    """Who executes an aggregation; everything else of a plan follows from the graph and the features.

    Args:
        num_workers: N, cores or threads; None leaves it to whoever executes the plan.
        num_groups: M, which divides N, or ``"auto"``.
        bandwidth_ratio: r, how many times faster the shared cache is than global memory; at least 1.
        mode: ``"balanced"`` counts the imbalance of the chunk ranges; ``"paper"`` is algorithm 1 as published, which
            answers one group for every r.

    Raises:
        ValueError: A number is out of range, or the mode is unknown.
    """

    num_workers: int | None = None
    num_groups: int | Literal["auto"] = "auto"
    bandwidth_ratio: float = 20
    mode: Literal["balanced", "paper"] = "balanced"

    def __post_init__(self) -> None:
        if self.num_workers is not None and self.num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, but is {self.num_workers}")
        if isinstance(self.num_groups, str):
            if self.num_groups != "auto":
                raise ValueError(f"num_groups must be a number or 'auto', but is {self.num_groups!r}")
        elif self.num_groups < 1:
            raise ValueError(f"num_groups must be at least 1, but is {self.num_groups}")
        if not self.bandwidth_ratio >= 1:
            raise ValueError(f"bandwidth_ratio must be at least 1, but is {self.bandwidth_ratio}")
        if self.mode not in ("balanced", "paper"):
            raise ValueError(f"mode={self.mode!r} is unknown; use 'balanced' or 'paper'")


def plan_cores(
    num_columns: int,
    chunk_loads: npt.ArrayLike,
    settings: PlanSettings | None = None,
    num_workers: int | None = None,
    *,
    compute_time: float | None = None,
    memory_time: float | None = None,
    element_size: int = 4,
) -> HybridPlan:
    """Plan one aggregation on the cores of one device, for one layer and direction.

    For every M that divides N, with S = ceil(D / M) and G = N / M, the cost is ``T_idle - T_saved`` (section 5.3):

    - ``T_idle = T_comp * (16 * ceil(S / 16) * M / D - 1)``, the cube unit's padding; for whole S the paper's formula;
    - ``T_saved = T_mem * (1 - 1 / (1 + (G - 1) * (r - 1)))``, what members read from the shared cache;
    - in the mode ``balanced`` plus ``T_imb = T_comp * (max / mean load of the G chunk ranges - 1)``: load imbalance,
      the reason for groups, is not in the paper's cost, which is therefore always least at M = 1. Numbers of groups
      at which the slowest worker does more than 1.05 times an even share of the padded work at M = 1 are then left
      out, unless all are: a cache that saves much must not buy idle cores.

    The least cost wins, the smaller M in a tie.

    Args:
        num_columns: D, columns of the features.
        chunk_loads: Edges of each chunk, integer ``[num_chunks]``.
        settings: Who executes; by default :class:`PlanSettings` as it stands.
        num_workers: N, where the settings leave it open; given, it wins.
        compute_time: T_comp, the time of the aggregation's multiply-adds on N workers, ideally shared out; by default
            edges * D / N, in multiply-adds of one worker.
        memory_time: T_mem, the time in which N workers load one row per edge from global memory, in the same unit; by
            default edges * D * element_size / N bytes, four bytes in the time of one multiply-add.
        element_size: Bytes of a feature, for that default.

    Raises:
        TypeError: Loads that are no integers.
        ValueError: No column, no worker, a negative load or time, a number of groups that does not divide the workers
            or exceeds the columns.
    """
    settings = settings or PlanSettings()
    num_workers = settings.num_workers if num_workers is None else num_workers
    if num_workers is None:
        raise ValueError("num_workers is neither in the settings nor given")
    check_sizes(num_columns, num_workers)
    loads = check_loads(chunk_loads)
    share = int(loads.sum()) * num_columns / num_workers
    t_comp = share if compute_time is None else compute_time
    t_mem = share * element_size / _BYTES_PER_MULTIPLY_ADD if memory_time is None else memory_time
    if not (t_comp >= 0 and t_mem >= 0):
        raise ValueError(f"times must not be negative, but compute_time={t_comp} and memory_time={t_mem}")
    if settings.num_groups == "auto":
        considered = [groups for groups in divisors(num_workers) if groups <= num_columns]
    else:
        check_groups(settings.num_groups, num_workers, num_columns)
        considered = [settings.num_groups]

    plans = {}
    for num_groups in considered:
        ranges = balance_ranges(loads, num_workers // num_groups)
        range_loads = [int(loads[start:stop].sum()) for start, stop in ranges]
        candidate = _cost(num_columns, num_workers, num_groups, range_loads, settings, t_comp, t_mem)
        plans[num_groups] = candidate, ranges, range_loads
    eligible = [candidate for candidate, _, _ in plans.values() if not candidate.note]
    best = min(eligible or [candidate for candidate, _, _ in plans.values()], key=lambda candidate: candidate.cost)
    _, ranges, range_loads = plans[best.num_groups]
    return HybridPlan(
        num_workers=num_workers,
        num_groups=best.num_groups,
        num_columns=num_columns,
        slices=slice_columns(num_columns, best.num_groups),
        chunk_ranges=ranges,
        loads=tuple(range_loads),
        candidates=tuple(candidate for candidate, _, _ in plans.values()),
        unit="multiply-adds of one worker" if compute_time is None and memory_time is None else "the unit of the times",
    )


def _cost(
    num_columns: int,
    num_workers: int,
    num_groups: int,
    range_loads: list[int],
    settings: PlanSettings,
    t_comp: float,
    t_mem: float,
) -> GroupingCost:
    members = num_workers // num_groups
    padded = padding(num_columns, num_groups)
    idle = t_comp * (padded - 1)
    saved = t_mem * (1 - 1 / (1 + (members - 1) * (settings.bandwidth_ratio - 1)))
    if settings.mode == "paper":
        return GroupingCost(num_groups, idle - saved, {"T_idle": idle, "T_saved": saved})
    imbalance = max_over_mean(np.array(range_loads))
    unbalanced = t_comp * (imbalance - 1)
    note = "unbalanced" if padded * imbalance > TOLERATED * padding(num_columns, 1) else ""
    terms = {"T_idle": idle, "T_saved": saved, "T_imb": unbalanced}
    return GroupingCost(num_groups, idle - saved + unbalanced, terms, note)

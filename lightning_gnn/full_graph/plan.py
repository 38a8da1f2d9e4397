"""Planning for several devices: grouping of the ranks, and ownership of rows.

Devices do not share a cache, so communication volume and memory determine the grouping. For dense layers, every rank
owns some rows of each split.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gnn.compressed.hybrid_plan import (
    GroupingCost,
    HybridPlan,
    balance_ranges,
    check_groups,
    check_loads,
    check_sizes,
    divisors,
    slice_columns,
)

_EDGE_BYTES = 28  # per direction a column, a packed one for compiled loops, a weight; and the edge of the other one


def plan_devices(
    num_columns: int,
    num_rows: int,
    chunk_loads: npt.ArrayLike,
    num_ranks: int,
    num_groups: int | Literal["auto"] = "auto",
    memory_limit: int | None = None,
    *,
    element_size: int = 4,
) -> HybridPlan:
    """Plan one layer on several devices: a rank owns V / N rows for dense layers, and one slice of one range.

    An aggregation converts rows to slices, multiplies, and converts the result back to rows, both by all-to-all; the
    backward pass runs the adjoints. With C_g the vertices with an edge into group g, both passes exchange

        ``2 * (1 - 1/N) * D * (sum over g of C_g + V)`` numbers,

    with a minimum at M = N. Rank (m, g) stores its edges in both directions, C_g and V_g rows of D_m columns, and twice
    V / N whole rows: ``28 * E_g + ((C_g + V / G) * D_m + 2 * V / N * D) * element_size`` bytes; with M = N,
    these are all edges. The smallest volume that fits into memory is chosen, with the larger M in a tie.

    Args:
        num_columns: D, columns of the exchanged features.
        num_rows: V, vertices.
        chunk_loads: Edges of each chunk, integer ``[num_chunks]``.
        num_ranks: N.
        num_groups: M, a divisor of N, or ``"auto"``.
        memory_limit: Bytes that a rank may use in total; None for no limit.
        element_size: Bytes of a feature.

    Raises:
        TypeError: The loads are not integers.
        ValueError: No grouping fits into memory; there are no columns or no ranks; a load or ``num_rows`` is negative;
            ``num_groups`` does not divide the ranks or exceeds the columns.
    """
    # Check the arguments, and list the numbers of groups to compare.
    check_sizes(num_columns, num_ranks)
    loads = check_loads(chunk_loads)
    if num_rows < 0:
        raise ValueError(f"num_rows must not be negative, but is {num_rows}")
    if num_groups == "auto":
        options = [groups for groups in divisors(num_ranks) if groups <= num_columns]
    elif isinstance(num_groups, str):
        raise ValueError(f"num_groups must be a number or 'auto', but is {num_groups!r}")
    else:
        check_groups(num_groups, num_ranks, num_columns)
        options = [num_groups]
    # Compute the communication volume of each grouping, and the memory of its most loaded rank.
    candidates = []
    for groups in options:
        edges = _range_loads(loads, num_ranks // groups)
        rows = sum(min(num_rows, load) for load in edges) + num_rows
        # The bytes sent by all ranks, and the memory of a rank with the widest slice and the heaviest range.
        volume = 2 * (1 - 1 / num_ranks) * num_columns * rows * element_size
        width = max(stop - start for start, stop in slice_columns(num_columns, groups))
        slice_rows = min(num_rows, max(edges)) + num_rows * groups / num_ranks
        dense = 2 * num_rows / num_ranks * num_columns
        memory = max(edges) * _EDGE_BYTES + (slice_rows * width + dense) * element_size
        note = "too large" if memory_limit is not None and memory > memory_limit else ""
        candidates.append(GroupingCost(groups, volume, {"bytes per rank": memory}, note))
    # Groupings that exceed the memory limit remain in the plan with a note, but are not eligible.
    eligible = [candidate for candidate in candidates if not candidate.note]
    if not eligible:
        assert memory_limit is not None
        least = min(candidate.terms["bytes per rank"] for candidate in candidates)
        given, advice = ("", "") if num_groups == "auto" else (f" in num_groups={num_groups}", " or num_groups='auto'")
        raise ValueError(
            f"{int(loads.sum())} edges, {num_rows} rows and {num_columns} columns on {num_ranks} ranks{given} need "
            f"{least / 1e9:.4g} GB per rank, but only {memory_limit / 1e9:.4g} GB are available; use more ranks, "
            f"narrower features{advice}"
        )
    # The reversed order prefers more groups in a tie.
    best = min(reversed(eligible), key=lambda candidate: candidate.cost).num_groups
    return HybridPlan(
        num_workers=num_ranks,
        num_groups=best,
        num_columns=num_columns,
        slices=slice_columns(num_columns, best),
        chunk_ranges=balance_ranges(loads, num_ranks // best),
        loads=tuple(_range_loads(loads, num_ranks // best)),
        candidates=tuple(candidates),
        unit="bytes sent by all ranks, forward and backward",
    )


def _range_loads(loads: np.ndarray, members: int) -> list[int]:
    """Return the number of edges in each range of chunks."""
    return [int(loads[start:stop].sum()) for start, stop in balance_ranges(loads, members)]


@dataclass(frozen=True, eq=False)
class Ownership:
    """Assignment of rows to ranks."""

    order: Tensor  # vertices sorted by rank, then by id, int64 [V]
    offsets: tuple[int, ...]  # start of each rank's vertices in ``order``, N + 1 numbers from 0 to V
    position: Tensor  # index of each vertex in ``order``, int64 [V]

    @property
    def num_ranks(self) -> int:
        """Number of ranks, N."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> list[int]:
        """Number of rows of each rank."""
        return [stop - start for start, stop in pairwise(self.offsets)]

    def rows(self, rank: int) -> Tensor:
        """Return the vertices of a rank, ascending, int64."""
        return self.order[self.offsets[rank] : self.offsets[rank + 1]]


def shard_rows(num_rows: int, num_ranks: int, splits: Mapping[str, Tensor]) -> Ownership:
    """Assign rows to ranks round-robin within each split; ``splits`` are masks, bool ``[V]``."""
    # Every rank needs a node of each nonempty split, since a loss over no nodes is NaN. Encode each combination of
    # splits as a number, to sort the rows by it.
    code: np.ndarray = np.zeros(num_rows, np.int64)
    for name, mask in splits.items():
        num_nodes = int(mask.sum())
        if 0 < num_nodes < num_ranks:
            raise ValueError(
                f"the {name} split has {num_nodes} nodes, but there are {num_ranks} ranks, and each needs one; "
                f"use at most {num_nodes} devices"
            )
        code = 2 * code + (~mask).cpu().numpy()
    # Assign the sorted rows round-robin: every rank gets an equal part of each combination.
    by_code = np.argsort(code, kind="stable")
    owner: np.ndarray = np.empty(num_rows, np.int64)
    owner[by_code] = np.arange(num_rows) % num_ranks
    # Overlapping splits may still leave a rank without a node of one of them.
    for name, mask in splits.items():
        if not bool(mask.any()):
            continue
        counts = np.bincount(owner[mask.cpu().numpy()], minlength=num_ranks)
        if not counts.all():
            raise ValueError(
                f"the splits overlap, so that rank {int(counts.argmin())} of {num_ranks} gets no node of the {name} "
                f"split ({int(mask.sum())} nodes); use fewer devices or splits that do not overlap"
            )
    # Sort rows by owner, then by id, and invert the permutation.
    order = np.argsort(owner, kind="stable")
    position: np.ndarray = np.empty(num_rows, np.int64)
    position[order] = np.arange(num_rows)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=num_ranks))])
    return Ownership(torch.from_numpy(order), tuple(int(offset) for offset in offsets), torch.from_numpy(position))

"""In which order an Ascend chip computes a layer on a mini-batch, and what runs where."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_gnn.ascend_ops.cost_model import atlas_a2, product_cycles, row_sums_cycles


@dataclass(frozen=True)
class UpdatePlan:
    """Who does what of a layer, and the cycles that the model of the chip expects.

    Args:
        aggregate_first: Sums and product in one kernel, and not the product before the sums.
        vector: Cycles of the busiest vector core.
        cube: Cycles of the busiest cube core.
        cycles: Of the layer, forward and backward as far as wanted.
        other: The same in the other order.
    """

    aggregate_first: bool
    vector: float
    cube: float
    cycles: float
    other: float

    def __str__(self) -> str:
        order = (
            "sums on the vector cores beside the product on the cube cores, in one kernel"
            if self.aggregate_first
            else "the product on the cube cores, then sums on the vector cores"
        )
        return (
            f"{order}: {self.cycles:,.0f} cycles (vector {self.vector:,.0f}, cube {self.cube:,.0f}), "
            f"the other order {self.other:,.0f}"
        )


@lru_cache(maxsize=4096)
def plan_update(
    num_sources: int,
    num_targets: int,
    num_edges: int,
    num_in: int,
    num_out: int,
    cores: int,
    wants_x: bool = False,
    wants_weight: bool = False,
) -> UpdatePlan:
    """Choose the order of a layer by what forward and backward pass cost together."""
    chip = atlas_a2()
    forward = row_sums_cycles(num_targets, num_edges, num_in, cores, chip)
    product = product_cycles(num_targets, num_in, num_out, cores, chip)
    first = [(forward, product, max(forward, product))]
    before = product_cycles(num_sources, num_in, num_out, cores, chip)
    after = row_sums_cycles(num_targets, num_edges, num_out, cores, chip)
    last = [(after, before, after + before)]
    # Backward: the gradient along the edges, times W beside it. Multiplied first, W's gradient wants it summed, too.
    back = row_sums_cycles(num_sources, num_edges, num_out, cores, chip)
    multiplied = product_cycles(num_sources, num_out, num_in, cores, chip) if wants_x else 0.0
    if wants_x:
        first.append((back, multiplied, max(back, multiplied)))
    if wants_x or wants_weight:
        last.append((back, multiplied, max(back, multiplied)))
    if wants_weight:
        first.append((0.0, *(product_cycles(num_out, num_targets, num_in, cores, chip),) * 2))
        last.append((0.0, *(product_cycles(num_out, num_sources, num_in, cores, chip),) * 2))
    totals = [[sum(step[place] for step in steps) for place in range(3)] for steps in (first, last)]
    aggregate_first = totals[0][2] <= totals[1][2]
    chosen, other = totals if aggregate_first else totals[::-1]
    vector, cube, cycles = chosen
    return UpdatePlan(aggregate_first, vector, cube, cycles, other[2])

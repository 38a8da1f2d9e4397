"""Pure plans: who computes what. No device, no file, nothing of the package."""

from lightning_gnn.planning.devices import plan_devices
from lightning_gnn.planning.grouping import PlanSettings, plan_cores
from lightning_gnn.planning.plan import GroupingCost, HybridPlan, slice_columns
from lightning_gnn.planning.ranges import balance_ranges

__all__ = [
    "GroupingCost",
    "HybridPlan",
    "PlanSettings",
    "balance_ranges",
    "plan_cores",
    "plan_devices",
    "slice_columns",
]

"""Pure plans: who computes what. No device, no file, nothing of the package."""

from lightning_gnn.planning.bottleneck import Remedy, find_remedy
from lightning_gnn.planning.damping import Damping
from lightning_gnn.planning.decisions import Decision, ReplayedDecisions, read_decisions
from lightning_gnn.planning.devices import plan_devices
from lightning_gnn.planning.grouping import PlanSettings, plan_cores
from lightning_gnn.planning.hyscale_model import PerformanceModel
from lightning_gnn.planning.hyscale_scaling import ScalingPoint, scaling_study, scaling_table
from lightning_gnn.planning.mapping import IterationTimes, Mapping
from lightning_gnn.planning.plan import GroupingCost, HybridPlan, slice_columns
from lightning_gnn.planning.ranges import balance_ranges
from lightning_gnn.planning.resources import DynamicResourceManager
from lightning_gnn.planning.workload import BatchSizes, Platform, Processor, Workload

__all__ = [
    "BatchSizes",
    "Damping",
    "Decision",
    "DynamicResourceManager",
    "GroupingCost",
    "HybridPlan",
    "IterationTimes",
    "Mapping",
    "PerformanceModel",
    "PlanSettings",
    "Platform",
    "Processor",
    "Remedy",
    "ReplayedDecisions",
    "ScalingPoint",
    "Workload",
    "balance_ranges",
    "find_remedy",
    "plan_cores",
    "plan_devices",
    "read_decisions",
    "scaling_study",
    "scaling_table",
    "slice_columns",
]

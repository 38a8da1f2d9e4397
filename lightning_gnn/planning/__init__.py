"""Pure plans: who computes what. No device, no file, nothing of the package."""

from lightning_gnn.planning.bottleneck import Remedy, find_remedy
from lightning_gnn.planning.collective_plan import CollectivePlan
from lightning_gnn.planning.damping import Damping
from lightning_gnn.planning.decisions import Decision, ReplayedDecisions, read_decisions
from lightning_gnn.planning.devices import plan_devices
from lightning_gnn.planning.dispatcher import Dispatcher, initial_ratio, relaxed_time
from lightning_gnn.planning.dual_buffer import DualBuffer, Step
from lightning_gnn.planning.grouping import PlanSettings, plan_cores
from lightning_gnn.planning.hyscale_model import PerformanceModel
from lightning_gnn.planning.hyscale_scaling import ScalingPoint, scaling_study, scaling_table
from lightning_gnn.planning.mapping import IterationTimes, Mapping
from lightning_gnn.planning.plan import GroupingCost, HybridPlan, slice_columns
from lightning_gnn.planning.ranges import balance_ranges
from lightning_gnn.planning.resources import DynamicResourceManager
from lightning_gnn.planning.simulate import Simulation, simulate_dual_buffer
from lightning_gnn.planning.stage_times import Duration, StageTimes
from lightning_gnn.planning.timeline import Interval, Timeline
from lightning_gnn.planning.workload import BatchSizes, Platform, Processor, Workload

__all__ = [
    "BatchSizes",
    "CollectivePlan",
    "Damping",
    "Decision",
    "Dispatcher",
    "DualBuffer",
    "Duration",
    "DynamicResourceManager",
    "GroupingCost",
    "HybridPlan",
    "Interval",
    "IterationTimes",
    "Mapping",
    "PerformanceModel",
    "PlanSettings",
    "Platform",
    "Processor",
    "Remedy",
    "ReplayedDecisions",
    "ScalingPoint",
    "Simulation",
    "StageTimes",
    "Step",
    "Timeline",
    "Workload",
    "balance_ranges",
    "find_remedy",
    "initial_ratio",
    "plan_cores",
    "plan_devices",
    "read_decisions",
    "relaxed_time",
    "scaling_study",
    "scaling_table",
    "simulate_dual_buffer",
    "slice_columns",
]

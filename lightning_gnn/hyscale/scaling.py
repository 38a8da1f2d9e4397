"""How hybrid training scales to many accelerators and nodes, by the performance model (HyScale-GNN, section VI-D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_gnn.graph.hybrid_plan import aligned
from lightning_gnn.graph.workload import Platform, Workload
from lightning_gnn.hyscale.mapping import Mapping
from lightning_gnn.hyscale.model import PerformanceModel


@dataclass(frozen=True)
class ScalingPoint:
    """The prediction for one number of accelerators and nodes.

    Args:
        accelerators: Of each node.
        nodes: How many.
        mapping: The best one, the same on each node.
        iteration: Seconds.
        sync: Seconds of it in which gradients are averaged, inside the node and between nodes.
        mteps: Million traversed edges per second, all nodes together.
        speedup: Against the first point.
        limit: The stage that takes longest.
    """

    accelerators: int
    nodes: int
    mapping: Mapping
    iteration: float
    sync: float
    mteps: float
    speedup: float
    limit: str


def scaling_study(
    platform: Platform,
    workload: Workload,
    accelerators: Sequence[int] = (1, 2, 4, 8, 12, 16),
    nodes: Sequence[int] = (1,),
    cpu_trainers: int = 1,
) -> list[ScalingPoint]:
    """Predict the throughput for numbers of accelerators and nodes.

    The batch grows with the accelerators, as in the paper: each brings the seeds that one of the platform's has in the
    workload. Between nodes only the gradients' all-reduce is added, since each has the graph and its own seeds.

    Args:
        platform: The node; its own numbers of accelerators and nodes do not matter beyond the batch.
        workload: What is trained; its batch is that of the platform as given.
        accelerators: Numbers of accelerators of a node, at least 1.
        nodes: Numbers of nodes.
        cpu_trainers: CPU trainers of each node.

    Returns:
        A point for each number of nodes, and within it of accelerators.

    Raises:
        ValueError: The platform has no accelerator to multiply.
    """
    if platform.accelerator is None:
        raise ValueError("the scaling study multiplies accelerators, but the platform has none")
    each = workload.batch_size / platform.num_accelerators
    points: list[ScalingPoint] = []
    for count in nodes:
        for number in accelerators:
            here = replace(platform, num_accelerators=number, num_nodes=count)
            model = PerformanceModel(here, replace(workload, batch_size=max(1, round(each * number))))
            mapping = model.best_mapping(cpu_trainers)
            mteps = model.mteps(mapping)
            points.append(
                ScalingPoint(
                    number,
                    count,
                    mapping,
                    model.iteration_time(mapping),
                    model.sync_time(),
                    mteps,
                    mteps / points[0].mteps if points else 1.0,
                    _limit(model, mapping),
                )
            )
    return points


def scaling_table(points: Sequence[ScalingPoint]) -> str:
    """Return a scaling study as a table."""
    rows = [["nodes", "accelerators", "seeds on the CPU", "iteration ms", "sync ms", "MTEPS", "speedup", "limit"]]
    for point in points:
        share = f"{point.mapping.cpu_seeds / point.mapping.total:.1%}"
        times = [f"{1e3 * point.iteration:.4g}", f"{1e3 * point.sync:.3g}"]
        speed = [f"{point.mteps:.4g}", f"{point.speedup:.2f}"]
        rows.append([str(point.nodes), str(point.accelerators), share, *times, *speed, point.limit])
    return "\n".join(aligned(rows))


def _limit(model: PerformanceModel, mapping: Mapping) -> str:
    times = model.stage_times(mapping)
    propagation = max(seconds or 0.0 for seconds in times.trainers) + model.sync_time()
    stages = {
        "Sampling": max(times.sample_cpu or 0.0, times.sample_accelerator or 0.0),
        "Feature Loading": times.load or 0.0,
        "Data Transfer": times.transfer or 0.0,
        "Propagation": propagation,
        "CPU cores": model.turns_time(mapping),
    }
    return max(stages, key=stages.__getitem__)

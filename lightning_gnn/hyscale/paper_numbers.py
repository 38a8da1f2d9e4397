"""What HyScale-GNN was evaluated on (tables II and III), as an example of the performance model's input.

>>> print(PerformanceModel(cpu_fpga(4), paper_workload("ogbn-products", trainers=5)).table())
"""

from __future__ import annotations

from typing import Literal

from lightning_gnn.graph.workload import Platform, Processor, Workload

EPYC_7763 = Processor(flops=3.6e12, memory_bandwidth=205e9)
RTX_A5000 = Processor(flops=27.8e12, memory_bandwidth=768e9)
ALVEO_U250 = Processor(flops=0.6e12, memory_bandwidth=77e9, pipelined=True)
"""Table II."""

DUAL_EPYC_7763 = Processor(flops=2 * EPYC_7763.flops, memory_bandwidth=EPYC_7763.memory_bandwidth)
"""Both sockets, features in the memory of one: so Feature Loading saturates at 12 accelerators, as in the paper."""

CORES = 2 * 64
PCIE_3, PCIE_4 = 16e9, 32e9
"""Bytes per second of 16 lanes, which the U250 and the A5000 have; the paper leaves them out."""

DATASETS = {
    "ogbn-products": (2_449_029, 61_859_140, (100, 256, 47)),
    "ogbn-papers100M": (111_059_956, 1_615_685_872, (128, 256, 172)),
    "MAG240M (homo)": (121_751_666, 1_297_748_926, (756, 256, 153)),
}
"""Table III: vertices, edges, and f0, f1, f2."""

NUM_TRAIN = {"ogbn-products": 196_615, "ogbn-papers100M": 1_207_179, "MAG240M (homo)": 1_112_392}
"""Training vertices of the data sets' own splits, which the paper leaves out."""

FANOUTS = (25, 10)
BATCH_SIZE = 1024
"""Of each trainer (section VI-A2)."""


def cpu_gpu(num_accelerators: int = 4) -> Platform:
    """Return two EPYC 7763 and some A5000. Sampling is left out: the paper measured it, and does not say how long."""
    return Platform(DUAL_EPYC_7763, CORES, RTX_A5000, num_accelerators, PCIE_4)


def cpu_fpga(num_accelerators: int = 4) -> Platform:
    """Return two EPYC 7763 and some Alveo U250. Sampling is left out."""
    return Platform(DUAL_EPYC_7763, CORES, ALVEO_U250, num_accelerators, PCIE_3)


def paper_workload(dataset: str, trainers: int, model: Literal["gcn", "sage"] = "gcn") -> Workload:
    """Return a workload of section VI-A2.

    Args:
        dataset: One of :data:`DATASETS`.
        trainers: How many trainers share an iteration's seeds, 1024 each.
        model: GraphSAGE concatenates, so that its updates take in two vectors.

    Raises:
        KeyError: There is no such data set.
    """
    vertices, edges, widths = DATASETS[dataset]
    return Workload(
        vertices,
        edges,
        NUM_TRAIN[dataset],
        BATCH_SIZE * trainers,
        FANOUTS,
        widths,
        update_inputs=2 if model == "sage" else 1,
    )

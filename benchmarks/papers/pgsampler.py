"""PGSampler's figures and tables, beside the H100's figures of ``make bench-gpu`` and its convergence on the CPU.

Reads gpu_persistent.json, gpu_first.json and gpu_model.json of benchmarks/results. Measures here, on the
CPU: the workload of table I with ``semantics="every_hop"``, and figure 11.
"""

from __future__ import annotations

import json
import logging
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from benchmarks.gpu.persistent import GRAPHS
from benchmarks.harness import RESULTS
from benchmarks.papers.page import Cell, Page, Table, parse
from lightning_gnn import NeighborDataModule
from lightning_gnn.datasets.synthetic import planted_power_law, power_law_graph
from lightning_gnn.graph import CSCGraph
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.ops import sample_neighbors

TEXT = """
Xiaohui Wei, Weikai Tang, Hao Qi, Hengshan Yue: *PGSampler: Accelerating GPU-based Graph Sampling in GNN Systems via
Workload Fusion*. One command makes this page: `python -m benchmarks.papers.pgsampler`.

The paper measured an NVIDIA RTX 3090 (table III: a Tesla P40) against DGL 1.0.1. Our times are of one NVIDIA H100, on
graphs with the sizes of table II and a similar skew. The baseline is our own kernels hop by hop, with a wait of the
host after each, so the ratios compare designs, not systems. "Simulated" is the roofline of `benchmarks.gpu.model`.
The run stopped after 17 settings of ogbn-products; the other five graphs were not reached.

`semantics="every_hop"` is the paper's. The GPU figures are of the default, which expands a node once. No GPU has run
the kernel of every hop, or swept warps and fetch sizes (`make bench-gpu ARGS="--only samples,launches"`).
"""
KERNELS = (
    "Another baseline: our kernels hop by hop read O(fanout) edges per row, and the fused ones reach 95 % of the "
    "random reads this GPU can do. Fusion saves launches only; the queue adds phases that order the sample like the "
    "CPU's."
)
NOT_REACHED = "not measured: the GPU run ended before this graph"
HOST = "another host, and PyTorch's launches instead of DGL's"
SMALL = "two small kernels, which also number the nodes, instead of one"
RANDOM = "an H100, and O(fanout) reads per row instead of a reservoir over its list"
PROFILER = "needs Nsight Compute or CUPTI, which the run did not have"
MEANS = {"Reddit": 1.19, "Flickr": 1.47, "Yelp": 1.37, "ogbn-arxiv": 1.44, "Coauthor-physics": 1.46}
TABLE_1 = ((2048, 129.0, 13.2, 15.48, 5.97), (21633, 127.7, 92.4, 48.68, 19.49), (179709, 127.0, 662.0, 55.02, 24.79))
OURS = {"persistent": "queue", "fused": "fused mode"}


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def ratios(cells: Sequence[dict[str, Any]], mode: str, kind: str, peer: str = "hop_by_hop") -> list[float]:
    """Return the peer's median over that of a mode, for each setting."""
    return [cell[kind][peer]["median"] / cell[kind][mode]["median"] for cell in cells]


def table_1(split: Sequence[dict[str, Any]], workload: Sequence[int | None]) -> Table:
    cells = []
    for hop, ((count, pre, kernel, compute, memory), seen) in enumerate(zip(TABLE_1, split[1:], strict=True)):
        name = f"hop {hop + 1}"
        cells += [
            Cell(f"{name}, workload, vertices (CPU, every hop)", count, measured=workload[hop]),
            Cell(f"{name}, before the kernel, us", pre, measured=seen["pre_us"], why="" if hop == 0 else HOST),
            Cell(f"{name}, kernels, us", kernel, measured=seen["kernel_us"], why=RANDOM if hop else SMALL),
            Cell(f"{name}, computation, %", compute, why=PROFILER),
            Cell(f"{name}, memory, %", memory, why=PROFILER),
        ]
    text = "Three hops, fanout 10, 2,048 seeds, ogbn-products. Ours: hop by hop, two kernels a hop, of new nodes only."
    return Table("Table I: a mini-batch hop by hop", "part", cells, text, "The graph is generated, so hubs differ.")


def speedups(cells: Sequence[dict[str, Any]]) -> list[Table]:
    """Return figures 8 to 10."""
    kernel, whole = ({mode: ratios(cells, mode, f"{kind}_us") for mode in OURS} for kind in ("kernel", "whole"))
    figure_8 = [Cell(f"{name}, mean", mean, why=NOT_REACHED) for name, mean in MEANS.items()]
    for mode, name in OURS.items():
        figure_8.append(Cell(f"ogbn-products, mean, {name}", 1.23, measured=statistics.mean(kernel[mode])))
        figure_8.append(Cell(f"largest, {name}", 1.57, measured=max(kernel[mode])))
    model, samples = read("gpu_model"), read("gpu_first")["parts"]["samples"]

    def row_of(key: str, fanouts: str, bulk: int) -> Any:
        what = f"ogbn-products, {fanouts}, 1,024 seeds"
        rows = (row for row in model[key] if (row["what"], row["gpu"]) == (what, "H100 SXM"))
        return next(row for row in rows if row.get("bulk", 1) == bulk)

    alone, bulk = row_of("roofline", "10-10-10", 1), row_of("roofline", "15-10-5", 8)
    figure_9 = [
        Cell("largest, queue", 2.22, alone["hop_by_hop_us"] / row_of("queue", "10-10-10", 1)["us"],
             max(whole["persistent"])),
        Cell("largest, fused mode", 2.22, alone["ratio"], max(whole["fused"])),
        Cell("15-10-5, 1,024 seeds, bulk of 8", 2.22, bulk["ratio"],
             samples["hop by hop, with the host"]["median"] / samples["bulk of 8"]["median"]),
    ]  # fmt: skip
    without = ratios(cells, "persistent", "kernel_us", "no_queue")
    figure_10 = [
        Cell(f"{cell['hops']} hops, fanout {cell['fanout']}, {cell['batch_size']} seeds", measured=ratio)
        for cell, ratio in zip(cells, without, strict=True)
    ]
    share = sum(ratio > 1 for ratio in without) / len(without)
    why = "With two hops and up to 4,096 seeds, the queue is 1 to 5 % slower; elsewhere up to 13 % faster."
    figure_10.append(Cell("share of settings in which the queue is faster", 1.0, measured=share, why=why))
    return [
        Table("Figure 8: kernels, speedup over hop by hop", "setting", figure_8, "", KERNELS),
        Table("Figure 9: whole samples, speedup over hop by hop", "setting", figure_9, "",
              "The paper's baseline is DGL on an RTX 3090. Ours has one wait per hop and little else before a kernel; "
              "a bulk of eight mini-batches hides launches and waits, which the paper does not do."),
        Table("Figure 10: kernels without the queue over those with it", "setting", figure_10,
              "Our \"DGL+Fusion\": a program per claim, scheduled by the hardware. The paper prints curves only."),
    ]  # fmt: skip


def convergence(quick: bool) -> Table:
    """Measure figure 11: validation accuracy with each semantics, on the CPU."""
    nodes, epochs = (1_000, 2) if quick else (10_000, 8)
    data = planted_power_law(nodes, 16 * nodes, num_classes=16, num_features=64, label_noise=0.02)
    cells = []
    for layers in (2, 3):
        found = {}
        for semantics in ("every_hop", "lowest_hop"):
            pl.seed_everything(1, verbose=False)
            module = NodeClassifier(GraphSAGE(64, 64, num_layers=layers, out_channels=16), 16)
            datamodule = NeighborDataModule(data, num_neighbors=[10] * layers, batch_size=1024, semantics=semantics)
            trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
                                 enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
            trainer.fit(module, datamodule)
            found[semantics] = float(trainer.callback_metrics["val_acc"])
            cells.append(Cell(f"{layers} layers, {semantics}, validation accuracy", measured=found[semantics]))
        ratio = found["every_hop"] / found["lowest_hop"]
        cells.append(Cell(f'{layers} layers, ratio ("approximately the same")', 1.0, measured=ratio))
    text = f"A planted graph of {nodes:,} nodes, fanout 10, 64 channels, {epochs} epochs, one seed, on the CPU."
    return Table("Figure 11: convergence", "setting", cells, text)


def table_2() -> Table:
    cells = []
    for name, (nodes, edges, _) in GRAPHS.items():
        cells += [Cell(f"{name}, vertices", nodes, measured=nodes), Cell(f"{name}, edges", edges, measured=edges)]
    text = "Ours are generated with these sizes, without features and classes; `conf/data` loads the real graphs."
    return Table("Table II: graphs", "graph", cells, text)


def table_3(cells: Sequence[dict[str, Any]]) -> Table:
    (cell,) = (c for c in cells if (c["hops"], c["fanout"], c["batch_size"]) == (3, 15, 10240))
    queue, fused = (ratios([cell], mode, "kernel_us")[0] for mode in OURS)
    closed = "printed by the paper; TurboGNN is not open source"
    return Table("Table III: kernels against TurboGNN, speedup over DGL", "setting", [
        Cell("Reddit, PGSampler, 4K, fanout 15", 1.23, why=NOT_REACHED),
        Cell("Reddit, TurboGNN, 4K, fanout 30", 1.15, why=closed),
        Cell("ogbn-products, PGSampler, 10K, fanout 15; our queue", 1.36, measured=queue),
        Cell("ogbn-products, PGSampler, 10K, fanout 15; our fused mode", 1.36, measured=fused),
        Cell("ogbn-products, TurboGNN, 200K, fanout 15", 1.30, why=closed),
    ], "", KERNELS)  # fmt: skip


def workload(quick: bool) -> list[int | None]:
    """Return the vertices that each hop of table I samples, with the paper's semantics."""
    if quick:
        return [None] * 3
    nodes, edges, exponent = GRAPHS["ogbn-products"]
    indptr, indices = power_law_graph(nodes, edges, exponent=exponent, seed=0)
    seeds = torch.randperm(nodes, generator=torch.Generator().manual_seed(1))[:2048]
    out = sample_neighbors(CSCGraph.from_csc(indptr, indices.int()), seeds, [10] * 3, every_hop=True)
    return [sum(out.num_sampled_nodes[: hop + 1]) for hop in range(3)]


def main(argv: Sequence[str] | None = None) -> Path:
    args = parse("pgsampler", __doc__, argv)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    cells = [cell for cell in read("gpu_persistent")["cells"] if cell["graph"] == "ogbn-products"]
    split = next(cell["split"]["hop_by_hop"] for cell in cells if "split" in cell)
    tables = [table_1(split, workload(args.quick)), table_2(), *speedups(cells), table_3(cells)]
    Page("pgsampler", "PGSampler", TEXT, [*tables, convergence(args.quick)]).write(args.out)
    out: Path = args.out
    return out


if __name__ == "__main__":
    main()

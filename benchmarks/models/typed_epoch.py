"""A training epoch on a heterogeneous graph through ``pl.Trainer``: ours against PyG's layers and loader, on the CPU.

R-GCN, GraphSAGE, R-GAT and HGT (4 heads), 2 layers and 128 hidden channels, fanouts 15 and 10 per edge type, 1024
papers per batch, on a graph of the shape of OGB-MAG with 128 floats per node. PyG uses ``NeighborLoader`` with pyg-lib
and, for GraphSAGE and R-GAT, ``HeteroConv`` as in its example of hierarchical sampling, trimmed layer by layer; for
HGT, ``HGTConv`` as in its example, trimmed; for R-GCN, the faster of ``RGCNConv`` on the homogeneous batch and the
equivalent ``HeteroConv`` with a layer per edge type (``FastRGCNConv`` would require a matrix per edge, 27 GB). R-GAT
uses a ``GATConv`` per edge type, since ``RGATConv`` has a different attention, over all relations at once. Each
contestant has its own process, with the best number of workers and of torch's threads among those tried. R-GCN also
trains in bf16-mixed. The figure is seconds per epoch.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HeteroConv, HeteroDictLinear, HGTConv, RGCNConv, SAGEConv
from torch_geometric.utils import trim_to_layer

from benchmarks import peers
from benchmarks.harness import MISSING, Gate, Isolated, Rows, compare, machine, measure, parse, publish
from benchmarks.sampling.typed import mag
from benchmarks.timed_epochs import TimedBatches, TimedEpochs
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.nn import HGT, RGAT, RGCN, HeteroGraphSAGE, NodeClassifier
from lightning_gnn.runtime.devices import num_cores

CLASSES = 349
FANOUTS = [15, 10]
HEADS = 4
TARGET = 4.0
SIZES = {
    "edges": (5_000_000, 30_000),
    "features": (128, 16),
    "hidden": (128, 16),
    "batch_size": (1024, 64),
    "train_nodes": (10_240, 256),
}
TRIAL_BATCHES = 3
BF16 = {"precision": "bf16-mixed", "feature_dtype": "bfloat16"}
CONTESTANTS: dict[str, dict[str, Any]] = {
    "ours, R-GCN": {"library": "ours", "model": "rgcn"},
    "PyG, R-GCN, RGCNConv": {"library": "pyg", "model": "rgcn"},
    "PyG, R-GCN, HeteroConv, trimmed": {"library": "pyg", "model": "hetero_rgcn"},
    "ours, R-GCN, bf16-mixed": {"library": "ours", "model": "rgcn", **BF16},
    "PyG, R-GCN, HeteroConv, trimmed, bf16-mixed": {"library": "pyg", "model": "hetero_rgcn", **BF16},
    "ours, GraphSAGE": {"library": "ours", "model": "sage"},
    "PyG, GraphSAGE, HeteroConv, trimmed": {"library": "pyg", "model": "sage"},
    "ours, R-GAT": {"library": "ours", "model": "rgat"},
    "PyG, R-GAT, HeteroConv, trimmed": {"library": "pyg", "model": "rgat"},
    "ours, HGT": {"library": "ours", "model": "hgt"},
    "PyG, HGT, HGTConv, trimmed": {"library": "pyg", "model": "hgt"},
}


def make_data(num_edges: int, num_features: int) -> HeteroData:
    """Return a graph of OGB-MAG's shape with features for all types, and labels for papers."""
    graph = mag(num_edges)
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    for name, count in graph.num_nodes.items():
        data[name].x = torch.randn(count, num_features, generator=generator)
    for kind, relation in graph.relations.items():
        data[kind].edge_index = relation.to_edge_index()
    data["paper"].y = torch.randint(CLASSES, (data["paper"].num_nodes,), generator=generator)
    return data


def _attention(wide: int, narrow: int, last: bool) -> GATConv:
    channels = narrow if last else narrow // HEADS
    return GATConv((wide, wide), channels, HEADS, concat=not last, add_self_loops=False, residual=True)


class PlainTyped(pl.LightningModule):
    """PyG's heterogeneous layers as in its examples."""

    def __init__(self, metadata: Any, sizes: tuple[int, int, int], model: str) -> None:
        super().__init__()
        self.kind, self.node_types = model, metadata[0]
        widths = list(pairwise(sizes))
        if model == "rgcn":
            self.convs = nn.ModuleList(RGCNConv(*width, len(metadata[1])) for width in widths)
            return
        if model == "hgt":
            _, hidden, classes = sizes
            self.lin, self.lin_out = HeteroDictLinear(sizes[0], hidden, metadata[0]), nn.Linear(hidden, classes)
            self.convs = nn.ModuleList(HGTConv(hidden, hidden, metadata, HEADS) for _ in widths)
            return
        self.roots = nn.ModuleList(nn.Linear(*width) for width in widths)
        make: Any = {
            "sage": lambda wide, narrow: SAGEConv((wide, wide), narrow),
            "hetero_rgcn": lambda wide, narrow: SAGEConv((wide, wide), narrow, root_weight=False, bias=False),
            "rgat": lambda wide, narrow: _attention(wide, narrow, last=narrow == sizes[-1]),
        }[model]
        self.convs = nn.ModuleList(HeteroConv({kind: make(*width) for kind in metadata[1]}) for width in widths)

    def forward(self, batch: HeteroData) -> Tensor:
        """Return the papers' rows."""
        if self.kind == "rgcn":
            whole = batch.to_homogeneous(node_attrs=["x"], edge_attrs=[])
            x, first = whole.x, self.node_types.index("paper")
            for i, conv in enumerate(self.convs):
                x = conv(x, whole.edge_index, whole.edge_type)
                x = F.dropout(x.relu(), 0.5, self.training) if i == 0 else x
            return x[whole.node_type == first]
        x, edges = batch.x_dict, batch.edge_index_dict
        nodes, counts = batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict
        if self.kind == "hgt":
            x = {name: rows.relu() for name, rows in self.lin(x).items()}
        for i, conv in enumerate(self.convs):
            x, edges, _ = trim_to_layer(i, nodes, counts, x, edges)
            given = x
            x = conv(x, edges)
            if self.kind == "hetero_rgcn":
                x = {name: rows + self.roots[i](given[name]) for name, rows in x.items()}
            if i == 0:
                act = (lambda rows: rows) if self.kind == "hgt" else F.relu  # HGT's layers include one
                x = {name: F.dropout(act(rows), 0.5, self.training) for name, rows in x.items() if rows is not None}
        return self.lin_out(x["paper"]) if self.kind == "hgt" else x["paper"]

    def training_step(self, batch: HeteroData, batch_idx: int) -> Tensor:
        """Return the cross-entropy of the seeds."""
        size = batch["paper"].batch_size
        loss = F.cross_entropy(self(batch)[:size], batch["paper"].y[:size])
        self.log("train_loss", loss, batch_size=size)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def make(data: HeteroData, seeds: Tensor, spec: dict[str, Any]) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    """Return the model and the DataModule of one contestant."""
    pl.seed_everything(0, verbose=False)
    kwargs = {name: spec[name] for name in ("batch_size", "num_workers")} | {"num_neighbors": FANOUTS}
    if spec["library"] == "ours":
        kind: Any = {"rgcn": RGCN, "sage": HeteroGraphSAGE, "rgat": RGAT, "hgt": HGT}[spec["model"]]
        heads = {"heads": HEADS} if spec["model"] in ("rgat", "hgt") else {}
        kwargs |= {name: spec[name] for name in ("feature_dtype",) if name in spec}
        model = kind(data.metadata(), spec["features"], spec["hidden"], 2, CLASSES, dropout=0.5, **heads)
        return NodeClassifier(model, CLASSES, target="paper"), NeighborDataModule(data, ("paper", seeds), **kwargs)
    module = PlainTyped(data.metadata(), (spec["features"], spec["hidden"], CLASSES), spec["model"])
    kwargs["persistent_workers"] = spec["num_workers"] > 0
    return module, peers.PyGNodeData(data, ("paper", seeds), **kwargs)


def contestant(spec: dict[str, Any], gate: Gate) -> None:
    """Try the settings from the gate, then train for one epoch per round."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    data = make_data(spec["edges"], spec["features"])
    papers = data["paper"].num_nodes
    seeds = torch.randperm(papers, generator=torch.Generator().manual_seed(0))[: spec["train_nodes"]]
    while "rounds" not in (message := gate.wait()):
        clock = TimedBatches()
        _train(data, seeds, {**spec, **message}, 1, clock, limit_train_batches=TRIAL_BATCHES)
        gate.report(clock.seconds())
    gate.report(0.0)
    _train(data, seeds, {**spec, **message}, message["rounds"], TimedEpochs(gate))


def _train(
    data: HeteroData, seeds: Tensor, spec: dict[str, Any], epochs: int, callback: pl.Callback, **more: Any
) -> None:
    torch.set_num_threads(spec["torch_threads"])
    model, datamodule = make(data, seeds, spec)
    pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=epochs, callbacks=[callback],
        precision=spec.get("precision", "32-true"), **more,
    ).fit(model, datamodule=datamodule)  # fmt: skip


def run(sizes: dict[str, int], runs: int, only: str = "") -> Rows:
    """Measure the contestants with ``only`` in their name, model by model, since each holds a copy of the graph."""
    names = [name for name in CONTESTANTS if only in name]
    models = dict.fromkeys(name.split(", ")[1] for name in names)
    return [
        row
        for model in models
        for row in _measured(sizes, runs, [name for name in names if name.split(", ")[1] == model])
    ]


def _measured(sizes: dict[str, int], runs: int, names: list[str]) -> Rows:
    """Choose the settings of each contestant, and measure them in turns."""
    cores, found, tried = num_cores(), {}, {}
    choices = [{"num_workers": w, "torch_threads": t} for w, t in dict.fromkeys([(0, cores), (1, cores), (2, 1)])]
    contestants: dict[str, Any] = {}
    try:
        for name in names:
            spec = CONTESTANTS[name]
            if spec["library"] == "pyg" and not peers.can_sample():
                contestants[name] = None
                continue
            process = contestants[name] = Isolated(contestant, {**sizes, **spec}, runs + 1)
            tried[name] = [process(choice) for choice in choices]
            best = choices[min(range(len(choices)), key=tried[name].__getitem__)]
            process({**best, "rounds": runs + 2})  # a process that ends would disturb the turns of others
            found[name] = best
        rows = measure(contestants, runs)
    finally:
        for process in contestants.values():
            if process is not None:
                process.close()
    for row in rows:
        if row["name"] in found:
            row["settings"] = found[row["name"]]
            row["tried_s_per_batch"] = [round(value, 4) for value in tried[row["name"]]]
        else:
            row["missing"] = MISSING
    return rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("typed_epoch", __doc__, SIZES, argv)
    described = machine()
    rows = run(args.sizes, args.runs, args.only)
    names = [row["name"] for row in rows]
    compared = [
        compare(
            rows, f"Training epoch, {model}, against PyG", [f"ours, {model}"],
            [name for name in names if name.startswith(f"PyG, {model}") and "bf16" not in name], False,
            TARGET if model == "R-GCN" else None,
        )
        for model in ("R-GCN", "GraphSAGE", "R-GAT", "HGT")
    ]  # fmt: skip
    for peer, name in (
        ("float32", "ours, R-GCN"),
        ("PyG in bf16-mixed", "PyG, R-GCN, HeteroConv, trimmed, bf16-mixed"),
    ):
        what = f"Training epoch, R-GCN, bf16-mixed, against {peer}"
        compared.append(compare(rows, what, ["ours, R-GCN, bf16-mixed"], [name], False))
    return publish(
        {
            "benchmark": "typed_epoch",
            "title": f"Training epoch on a heterogeneous graph, {args.edges:,} edges, {args.train_nodes:,} seeds",
            "unit": "s per epoch",
            "settings": {**args.sizes, "fanouts": FANOUTS, "layers": 2, "classes": CLASSES, "runs": args.runs},
            "machine": described,
            "rows": rows,
            "comparisons": compared,
        },
        args.out,
    )


if __name__ == "__main__":
    main()

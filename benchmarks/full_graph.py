"""Full-graph training through ``pl.Trainer``: ours against PyG over ``edge_index`` and over torch's sparse matrices.

Two-layer GCN and GAT with 256 hidden channels, as in NeutronAscend's evaluation (section 7), on graphs with the sizes
and the skew of its table 1. The figure is milliseconds per epoch (forward, backward, Adam), after one turn that does
not count. Each contestant has a process of its own and all of torch's threads. ``PyG, torch.sparse`` normalises and
transposes its matrix once, before the first epoch, which PyG itself does not: the strongest form of that peer.

The JSON also holds the time against the hidden size and against the number of workers (the paper's figures 11 and 12),
with a plot.
"""

from __future__ import annotations

import logging
import resource
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import psutil
import pytorch_lightning as pl
import torch
from torch_geometric.nn import models as pyg

from benchmarks.full_graph_peers import SHAPES, SparseGCN, make_graph
from benchmarks.harness import Gate, compare, measure_isolated, parse, publish
from benchmarks.machine import machine
from benchmarks.timed_epochs import TimedEpochs
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.nn import GAT, GCN, NodeClassifier

SIZES = {"hidden": (256, 16), "heads": (8, 2), "shrink": (1, 40), "sweep_hidden": (1, 0), "sweep_workers": (1, 0)}
LIBRARIES = {
    "GCN": ("ours", "PyG, edge_index", "PyG, torch.sparse"),
    "GAT": ("ours", "PyG, edge_index"),
}
EPOCHS = {"Cora": 20, "CiteSeer": 20, "PubMed": 5}
"""Epochs per turn on the small graphs, whose epochs are short."""


def make(spec: dict[str, Any]) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    """Return the model and the DataModule of one contestant."""
    pl.seed_everything(0, verbose=False)
    data = make_graph(spec["graph"], spec["root"], spec["shrink"])
    ours = spec["library"] == "ours"
    classes = int(data.y.max()) + 1
    kwargs: dict[str, Any] = {"dropout": 0.5}
    if spec["model"] == "GAT":
        kind = GAT if ours else pyg.GAT
        kwargs["heads"] = spec["heads"]
    elif ours:
        kind = GCN
    else:
        kind = SparseGCN if "sparse" in spec["library"] else pyg.GCN
        kwargs["cached"] = True  # PyG keeps the normalised edges
    model = kind(data.num_features, spec["hidden"], 2, classes, **kwargs)
    return NodeClassifier(model, classes, lr=0.01), FullGraphDataModule(data, compress=ours)


def contestant(spec: dict[str, Any], gate: Gate) -> None:
    """Train for as many turns as there are rounds."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(spec["threads"])
    if spec["device"] == "cpu":  # an allocation that fails is a result; the system would kill some process instead
        limit = int(0.9 * psutil.virtual_memory().total)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    model, datamodule = make(spec)
    epochs = EPOCHS.get(spec["graph"], 1)
    trainer = pl.Trainer(
        accelerator="gpu" if spec["device"] == "cuda" else "cpu",
        devices=1,
        strategy="ascend_hybrid" if spec["library"] == "ours" else "auto",
        max_epochs=gate.rounds * epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=[TimedEpochs(gate, epochs, unit=1e3)],
    )
    trainer.fit(model, datamodule)


def run(common: dict[str, Any], cases: Sequence[dict[str, Any]], runs: int, only: str = "") -> list[dict[str, Any]]:
    """Measure cases, one graph and model at a time, so that only their contestants lie in memory."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        specs = {}
        for library in LIBRARIES[case["model"]]:
            name = ", ".join([library, case["model"], case["graph"], *case.get("label", ())])
            if only in name:
                specs[name] = {**common, **case, "library": library}
        if case["graph"] not in ("Reddit", "Products"):
            rows += measure_isolated(contestant, specs, runs)
            continue
        for name, spec in specs.items():  # two of them together would not fit the memory
            try:
                rows += measure_isolated(contestant, {name: spec}, runs)
            except RuntimeError as error:
                if "allocate memory" not in str(error):
                    raise
                rows.append({"name": name, "missing": "out of memory"})
    return rows


def comparisons(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Set ours against each of PyG's forms."""
    found = []
    for model, libraries in LIBRARIES.items():
        for graph in SHAPES:
            for library in libraries[1:]:
                target = 2.5 if "edge_index" in library else 1.5
                names = [f"ours, {model}, {graph}"], [f"{library}, {model}, {graph}"]
                if any(row["name"] in names[0] for row in rows):
                    what = f"Full-graph epoch, {model} on {graph}, against {library}"
                    found.append(compare(rows, what, *names, False, target if model == "GCN" else None))
    return found


def draw(extra: dict[str, Any], path: Path) -> None:
    """Plot the two sweeps beside each other."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(extra), figsize=(5 * len(extra), 3.5), layout="constrained", squeeze=False)
    for axis, (title, rows) in zip(axes[0], extra.items(), strict=True):
        for library in LIBRARIES["GCN"]:
            found = [row for row in rows if row["name"].startswith(f"{library}, GCN") and "median" in row]
            labels = [row["name"].split(", ")[-1] for row in found]
            axis.plot(labels, [row["median"] for row in found], marker="o", label=library)
        axis.set(title=f"GCN on PubMed {title}", ylabel="ms per epoch", ylim=(0, None))
        axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(
        "full_graph",
        __doc__,
        SIZES,
        argv,
        paths={"planetoid": "folder of PyG's Planetoid files, for the real Cora and CiteSeer"},
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    described = machine()
    common = {"shrink": args.shrink, "heads": args.heads, "device": device, "root": args.planetoid}
    threads = torch.get_num_threads()
    usual = {"hidden": args.hidden, "threads": threads}
    cases = [{"graph": graph, "model": model, **usual} for model in LIBRARIES for graph in SHAPES]
    rows = run(common, cases, args.runs, args.only)
    extra: dict[str, Any] = {}
    if args.sweep_hidden:
        swept = [
            {"graph": "PubMed", "model": "GCN", "hidden": hidden, "threads": threads, "label": (f"hidden {hidden}",)}
            for hidden in (32, 64, 128, 256)
        ]
        extra["against hidden size"] = run(common, swept, args.runs, args.only)
    if args.sweep_workers:
        swept = [
            {"graph": "PubMed", "model": "GCN", "hidden": args.hidden, "threads": count, "label": (f"{count} workers",)}
            for count in sorted({1, 2, threads, *(n for n in (4, 8, 16) if n <= threads)})
        ]
        extra["against workers"] = run(common, swept, args.runs, args.only)
    if extra and args.out is not None:
        draw(extra, args.out.with_name(f"{args.out.stem}_sweeps.png"))
    result = {
        "benchmark": "full_graph",
        "title": f"Full-graph training, 2 layers, {args.hidden} hidden channels",
        "unit": "ms per epoch",
        "settings": {**args.sizes, "graphs": SHAPES, "runs": args.runs, "real_planetoid": args.planetoid is not None},
        "machine": described,
        "rows": rows,
        "comparisons": comparisons(rows),
        "extra": extra,
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()

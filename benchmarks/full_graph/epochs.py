"""Full-graph training through ``pl.Trainer``: ours against all graph formats that PyG's layers support.

Two-layer GCN and GAT with 256 hidden channels, as in NeutronAscend's evaluation (section 7), on graphs with the sizes
and the skew of its table 1. The figure is milliseconds per epoch (forward, backward, Adam). Each contestant has its own
process, or in ``benchmarks.gpu.everything`` its own thread, and they run in turns. Each uses one or all of torch's
threads, whichever is faster in a trial epoch; if an epoch takes seconds, it uses all. The peers are listed in
``benchmarks/full_graph/peers.py``. The JSON file also contains the lower bounds from the machine's copy bandwidth and
product rate.
"""

from __future__ import annotations

import logging
import resource
import warnings
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import psutil
import pytorch_lightning as pl
import torch
from torch_geometric.utils import coalesce

from benchmarks.device_clock import Clock, rounds
from benchmarks.full_graph.peers import PEERS, SHAPES, installed, make_graph, make_peer, shape, sparse_pair
from benchmarks.harness import Gate, InThread, Isolated, compare, machine, measure, parse, publish, shortened
from benchmarks.roofline import full_graph_roofline
from benchmarks.timed_epochs import TimedEpochs
from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.nn import GAT, GCN, NodeClassifier
from lightning_gnn.ops import aggregate
from lightning_gnn.planning.limits import measure_limits
from lightning_gnn.runtime.devices import num_cores

SIZES = {"hidden": (256, 16), "heads": (4, 2), "shrink": (1, 40)}
OURS = {"GCN": GCN, "GAT": GAT}
TARGETS = {"GCN": {"edge_index": 10.0, "sparse": 2.5}, "GAT": {"edge_index": 10.0}}
EPOCHS = {"PubMed": 5}
"""Epochs per turn if they are short."""
_SEARCHED_UP_TO = 3000.0
"""Maximum epoch time in milliseconds for which the number of threads is tuned."""
CUSPARSE = {"GCN": ("PyG, EdgeIndex", "PyG, torch.sparse"), "GAT": ("PyG, EdgeIndex",)}
"""Peers whose sums are torch's sparse product, on a GPU cuSPARSE's."""
DROPOUTS = (0.5, 0.0)
TURN = 20
"""Epochs per turn on a GPU."""


class ThreadsByTurn(Gate):
    """Sets torch's number of threads to the one given with each turn."""

    def wait(self) -> int:
        """Block until the turn begins."""
        threads: int = super().wait()
        torch.set_num_threads(threads)
        return threads


def make(spec: dict[str, Any]) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    """Return the model and the DataModule of one contestant."""
    pl.seed_everything(0, verbose=False)
    data = make_graph(spec["graph"], spec["shrink"])
    ours = spec["library"] == "ours"
    classes = int(data.y.max()) + 1
    sizes = (data.num_features, spec["hidden"], 2, classes)
    options: dict[str, Any] = {
        "dropout": spec.get("dropout", 0.5),
        **({"heads": spec["heads"]} if spec["model"] == "GAT" else {}),
    }
    kind = OURS[spec["model"]] if ours else partial(make_peer, spec["model"], spec["library"])
    return NodeClassifier(kind(*sizes, **options), classes, lr=0.01), FullGraphDataModule(data, compress=ours)


def contestant(spec: dict[str, Any], gate: Gate) -> None:
    """Train in all turns."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    if (
        spec["device"] == "cpu" and "turn" not in spec
    ):  # makes a failed allocation a result; otherwise, the system would kill some process
        limit = int(0.8 * psutil.virtual_memory().total)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    model, datamodule = make(spec)
    epochs = spec.get("turn", EPOCHS.get(spec["graph"], 1))
    turns = ThreadsByTurn(gate._pipe, gate.rounds)
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
        callbacks=[TimedEpochs(turns, epochs, unit=1e3)],
    )
    trainer.fit(model, datamodule)


def run(
    specs: dict[str, dict[str, Any]], runs: int, start: type[Isolated] = Isolated, search: bool = True
) -> list[dict[str, Any]]:
    """Measure contestants in turns, each with its best number of threads, which is part of its row's name.

    Args:
        start: Starts a contestant, in a process or a thread.
        search: Whether to search for the number of threads; otherwise, contestants have all.
    """
    counts = sorted({1, torch.get_num_threads()})[-2 if search else -1 :]
    contestants: dict[str, Isolated | None] = {}
    notes: dict[str, dict[str, Any]] = {}
    failed: list[dict[str, Any]] = []
    try:
        for name, spec in specs.items():
            if not installed(spec["library"]):
                contestants[name] = None
                continue
            peer = None
            try:
                contestants[name] = peer = start(contestant, spec, 1 + len(counts) + runs)
                first = peer(counts[-1])  # includes one-time setup
            except RuntimeError as error:
                if "allocate memory" not in str(error) and "out of memory" not in str(error):
                    raise
                if peer is not None:
                    peer.close()
                contestants.pop(name, None)
                failed.append({"name": name, "missing": "out of memory"})
                continue
            searched = counts if len(counts) > 1 and first <= _SEARCHED_UP_TO else []
            epochs = {count: peer(count) for count in searched}
            best = min(epochs, key=epochs.__getitem__) if epochs else counts[-1]
            notes[name] = {"threads": best, "ms by threads": {count: round(ms, 1) for count, ms in epochs.items()}}
        turns = {
            name: None if peer is None else partial(peer, notes[name]["threads"]) for name, peer in contestants.items()
        }
        return failed + [{**row, **notes.get(row["name"], {})} for row in measure(turns, runs, warmup=0)]
    finally:
        for peer in contestants.values():
            if peer is not None:
                peer.close()


def comparisons(rows: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Compare ours with the best of PyG's edge-list formats, and the best of its sparse-matrix formats."""
    found = []
    where = "on a GPU, " if device == "cuda" else ""
    for model, targets in TARGETS.items():
        for graph in SHAPES:
            ours = f"ours, {model}, {graph}"
            if not any(row["name"] == ours for row in rows):
                continue
            for form, target in targets.items():
                by_edge = [name for name in PEERS[model] if model == "GAT" or name == "PyG, edge_index"]
                peers = by_edge if form == "edge_index" else [name for name in PEERS[model] if name not in by_edge]
                what = f"Full-graph epoch, {model} on {graph}, {where}against PyG, {form}"
                names = [f"{name}, {model}, {graph}" for name in peers]
                found.append(compare(rows, what, [ours], names, False, target))
    return found


def bounds(hidden: int, heads: int, shrink: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the lower bound of each of our epochs on this machine, and the fraction of it that is reached."""
    limits = measure_limits(num_cores())
    found = {}
    for graph in SHAPES:
        nodes, edges, features, classes = shape(graph, shrink)
        for model in OURS:
            ours = next((row for row in rows if row["name"] == f"ours, {model}, {graph}" and "median" in row), None)
            if ours is not None:
                widths = (features, hidden, classes)
                bound = full_graph_roofline(nodes, edges, widths, model, heads, limits)
                over = round(ours["median"] / bound["bound ms"], 2)
                found[f"{model}, {graph}"] = {**bound, "measured over bound": over}
    return found


def measure_here(device: torch.device, runs: int, quick: bool = False, tiny: bool = False) -> dict[str, Any]:
    """Compare ours with PyG on ``EdgeIndex`` in this process, with dropout and without; and sums alone.

    Args:
        quick: Measure Products only.
        tiny: Shrink the graphs.
    """
    graphs = ["Products"] if quick or tiny else ["Products", "Reddit"]
    sizes = {name: (full, small)[tiny] for name, (full, small) in SIZES.items()}
    turn = TURN if device.type == "cuda" else 1
    rows, compared, added = [], [], []
    for graph in graphs:
        added += sums(device, graph, sizes["hidden"], sizes["shrink"], runs)
        for model, peers in CUSPARSE.items():
            for dropout in DROPOUTS:
                names = {library: f"{library}, {model}, {graph}, dropout {dropout:g}" for library in ("ours", *peers)}
                own = {"graph": graph, "model": model, "dropout": dropout, "device": device.type, "turn": turn, **sizes}
                specs = {name: {**own, "library": library} for library, name in names.items()}
                rows += run(specs, runs, InThread, search=False)
                against = "against PyG, sparse" if model == "GCN" else "against PyG, EdgeIndex"
                what = f"Full-graph epoch, {model} on {graph}, on a GPU{'' if dropout else ', no dropout'}, {against}"
                compared.append(compare(rows, what, [names["ours"]], [names[peer] for peer in peers], False))
    return {
        "title": f"Full-graph training, 2 layers, {sizes['hidden']} hidden channels", "unit": "ms per epoch",
        "settings": {**sizes, "graphs": graphs, "runs": runs, "epochs of a turn": turn}, "rows": rows,
        "comparisons": compared, "sums": added,
    }  # fmt: skip


def sums(device: torch.device, graph: str, hidden: int, shrink: int, runs: int) -> list[dict[str, Any]]:
    """Return the us of a sum over the graph, plain and weighted, by our kernel and by torch's sparse product."""
    data, clock, found = make_graph(graph, shrink), Clock(device), []
    edges = coalesce(data.edge_index, num_nodes=data.num_nodes)
    ours = CompressedGraph.from_edge_index(edges, num_nodes=data.num_nodes).to(device)
    for kind in ("plain", "weighted"):
        given = torch.rand(edges.size(1)) if kind == "weighted" else torch.ones(edges.size(1))
        matrix = sparse_pair(edges, given, data.num_nodes)[0].to(device)
        weight = ours.edge_order(given.to(device)) if kind == "weighted" else None
        for columns in dict.fromkeys((data.num_features, hidden, int(data.y.max()) + 1)):
            x = torch.rand(data.num_nodes, columns, device=device)
            calls = {"ours": partial(aggregate, ours, x, weight), "torch's": partial(torch.matmul, matrix, x)}
            apart = float((calls["ours"]() - calls["torch's"]()).abs().max())
            timed = {name: lambda turn, call=call: clock.device(call) for name, call in calls.items()}
            us = {name: round(median(seen[1:]), 1) for name, seen in rounds(timed, runs + 1).items()}
            cell = {"graph": graph, "sum": kind, "columns": columns, "us": us, "apart": apart}
            found.append({**cell, "ratio": shortened(us["torch's"] / us["ours"])})
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("full_graph", __doc__, SIZES, argv)
    described = machine()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = []
    for graph in SHAPES:
        for model in PEERS:
            specs = {
                f"{library}, {model}, {graph}": {
                    **{"graph": graph, "model": model, "library": library, "hidden": args.hidden},
                    **{"shrink": args.shrink, "heads": args.heads, "device": device},
                }
                for library in ("ours", *PEERS[model])
            }
            rows += run({name: spec for name, spec in specs.items() if args.only in name}, args.runs)
    result = {
        "benchmark": "full_graph",
        "title": f"Full-graph training, 2 layers, {args.hidden} hidden channels",
        "unit": "ms per epoch",
        "settings": {**args.sizes, "graphs": SHAPES, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": comparisons(rows, device),
    }
    if device == "cpu":
        result["roofline"] = bounds(args.hidden, args.heads, args.shrink, rows)
    return publish(result, args.out)


if __name__ == "__main__":
    main()

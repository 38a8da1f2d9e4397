"""A training epoch through ``pl.Trainer``: our DataModule and model against PyG's and GraphBolt's, on the CPU.

GraphSAGE, GCN and GAT (four heads) with 2 layers and 256 hidden channels, fanouts 25 and 10, batches of 1024 seeds.
PyG runs as in its Lightning example, on all sampled nodes in each layer, and with ``trim_to_layer``, which our models
apply automatically. Each contestant has its own process. A few mini-batches determine its best number of workers and of
torch's threads, and for PyG the edge format (a tensor, ``EdgeIndex``, ``SparseTensor``, Intel's extension); the rounds
use the best setting. The figure is seconds per epoch, and before it milliseconds per step: the same prepared mini-batch
trained several times on one thread. All but PyG's untrimmed variant also run in bf16-mixed (ours and GraphBolt with
features in bfloat16). The untrimmed variant, the slowest, is measured against ours in a few separate rounds. GraphBolt
trains GraphSAGE of DGL's layers on its blocks in a plain loop, without a Trainer, in its own environment
(``benchmarks.graphbolt``).
"""

from __future__ import annotations

import logging
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from benchmarks import graphbolt, peers
from benchmarks.harness import MISSING, Gate, Isolated, Rows, compare, measure, parse, publish
from benchmarks.roofline import roofline
from benchmarks.sampling.minibatch import make_data
from benchmarks.timed_epochs import TimedBatches, TimedEpochs
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.datasets.synthetic import power_law_graph
from lightning_gnn.nn import GAT, GCN, GraphSAGE, NodeClassifier
from lightning_gnn.planning.limits import MachineLimits, measure_limits
from lightning_gnn.runtime.devices import num_cores

CLASSES = 32
FANOUTS = [25, 10]
SIZES = {
    "nodes": (500_000, 10_000),
    "edges": (10_000_000, 100_000),
    "features": (100, 16),
    "hidden": (256, 32),
    "batch_size": (1024, 128),
    "train_nodes": (20_000, 1_000),
}
MODELS = {"SAGE": (GraphSAGE, {}), "GCN": (GCN, {}), "GAT": (GAT, {"heads": 4})}
NARROW = ", bf16-mixed"
PRECISIONS: dict[str, dict[str, Any]] = {"": {}, NARROW: {"precision": "bf16-mixed", "feature_dtype": "bfloat16"}}
"""Options by the suffix of the name."""
STEP = ", step"
"""Suffix of the names of rows of steps."""
STEPS = 4
"""Number of steps for a figure, after one that is not counted."""
GRAPHBOLT = "GraphBolt, SAGE"
TRIAL_BATCHES = {"ours": 16, "pyg": 4}
"""Number of mini-batches for choosing settings; the first is not counted. Those of ours take 20 to 50 ms."""
PLAIN_RUNS = 2
"""Maximum number of rounds of PyG's untrimmed variant."""
TARGETS = {"SAGE": (16.0, 11.0), "GCN": (None, 8.0), "GAT": (None, 5.0)}
"""Targets against PyG's untrimmed and trimmed variants."""


def contestants(model: str) -> dict[str, dict[str, Any]]:
    """Return the available contestants, by name."""
    ours = {f"ours, {model}{suffix}": {"library": "ours", **options} for suffix, options in PRECISIONS.items()}
    trimmed = {
        f"PyG, {model}, trimmed{suffix}": {"library": "pyg", "trim": True, **options}
        for suffix, options in PRECISIONS.items()
    }
    whole = {f"PyG, {model}": {"library": "pyg", "trim": False}}
    return {name: {"model": model, **spec} for name, spec in {**ours, **trimmed, **whole}.items()}


def settings(library: str) -> list[dict[str, int]]:
    """Return the numbers of workers and of torch's threads to try."""
    cores = num_cores()
    threads = sorted({1, 2, cores})
    pairs = (
        [(0, cores), (1, cores), (2, cores), (2, 1)] if library == "pyg" else [(w, t) for w in (1, 2) for t in threads]
    )
    return [{"num_workers": workers, "torch_threads": count} for workers, count in dict.fromkeys(pairs)]


def make(data: Data, seeds: torch.Tensor, spec: dict[str, Any]) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    """Return the model and the DataModule of one contestant."""
    pl.seed_everything(0, verbose=False)
    kwargs = {
        "num_neighbors": FANOUTS,
        "batch_size": spec["batch_size"],
        "num_workers": spec["num_workers"],
        "pin_memory": spec["device"] != "cpu",
    }
    sizes = (spec["features"], spec["hidden"], 2, CLASSES)
    if spec["library"] == "ours":
        kind, more = MODELS[spec["model"]]
        kwargs |= {name: spec[name] for name in ("feature_dtype", "sums_ahead") if name in spec}
        return NodeClassifier(kind(*sizes, dropout=0.5, **more), CLASSES, lr=0.01), NeighborDataModule(
            data, seeds, **kwargs
        )
    module = peers.PyGClassifier(*sizes, trim=spec["trim"], model=spec["model"], form=spec.get("form", "tensor"))
    return module, peers.PyGNodeData(data, seeds, persistent_workers=spec["num_workers"] > 0, **kwargs)


def trainer(spec: dict[str, Any], **more: Any) -> pl.Trainer:
    """Return a Trainer without output and checkpoints."""
    return pl.Trainer(
        accelerator="gpu" if spec["device"] == "cuda" else "cpu",
        devices=1,
        precision=spec.get("precision", "32-true"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def contestant(spec: dict[str, Any], gate: Gate) -> None:
    """Try the settings from the gate, then train for one epoch per round."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    data = make_data(spec["nodes"], spec["edges"], spec["features"], CLASSES)
    seeds = torch.randperm(spec["nodes"], generator=torch.Generator().manual_seed(0))[: spec["train_nodes"]]
    kept: list[Any] = []
    while "rounds" not in (message := gate.wait()):
        gate.report(_step(data, seeds, spec, kept) if "step" in message else _tried(data, seeds, {**spec, **message}))
    gate.report(0.0)
    chosen = {**spec, **message}
    torch.set_num_threads(chosen["torch_threads"])
    model, datamodule = make(data, seeds, chosen)
    trainer(chosen, max_epochs=chosen["rounds"], callbacks=[TimedEpochs(gate)]).fit(model, datamodule)


def _tried(data: Data, seeds: torch.Tensor, spec: dict[str, Any]) -> float:
    """Return seconds per mini-batch, infinite if it fails."""
    torch.set_num_threads(spec["torch_threads"])
    clock, batches = TimedBatches(), TRIAL_BATCHES[spec["library"]]
    try:
        model, datamodule = make(data, seeds, spec)
        trainer(spec, max_epochs=1, limit_train_batches=batches, callbacks=[clock]).fit(model, datamodule)
    except Exception as error:
        print(f"{spec['library']}, {spec['model']}, {_named(spec)}: {type(error).__name__}: {error}")
        return math.inf
    return clock.seconds()


def _step(data: Data, seeds: torch.Tensor, spec: dict[str, Any], kept: list[Any]) -> float:
    """Return milliseconds per step on one thread and one mini-batch, which ``kept`` holds with the model."""
    torch.set_num_threads(1)
    if not kept:
        model, datamodule = make(data, seeds, {**spec, "num_workers": 0})
        kept += [model, next(iter(datamodule.train_dataloader()))]
    model, batch = kept
    clock = TimedBatches()
    trainer(spec, max_epochs=1, callbacks=[clock]).fit(model, DataLoader([batch] * (1 + STEPS), batch_size=None))
    return 1e3 * clock.seconds()


class Chosen:
    """A contestant that chooses its settings by a few mini-batches each."""

    def __init__(self, name: str, spec: dict[str, Any], rounds: int) -> None:
        self.tried: dict[str, float] = {}
        self._process = Isolated(contestant, spec, rounds)
        best = self._best([{**each, "form": "tensor"} for each in settings(spec["library"])])
        if spec["library"] == "pyg":
            others = [{**best, "form": form} for form in peers.forms() if form != "tensor"]
            best = min((best, self._best(others) if others else best), key=lambda each: self.tried[_named(each)])
        self.runs = math.isfinite(self.tried[_named(best)])
        self.name = f"{name}, {_named(best)}" if self.runs else name
        self._begin = {**best, "rounds": rounds + 1}  # a process that ends would disturb the turns of others

    def _best(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        for choice in choices:
            self.tried[_named(choice)] = self._process(choice)
        return min(choices, key=lambda each: self.tried[_named(each)])

    def step(self) -> float:
        """Return milliseconds per step; only before the first turn."""
        return self._process({"step": True})

    def __call__(self) -> float:
        """Run one turn."""
        if self._begin:
            self._process(self._begin)
            self._begin = {}
        return self._process()

    def close(self) -> None:
        """End its process."""
        self._process.close()


def _named(chosen: dict[str, Any]) -> str:
    workers, threads = chosen["num_workers"], chosen["torch_threads"]
    form = chosen.get("form", "tensor")
    text = f"{workers} worker{'s' * (workers != 1)}, {threads} torch thread{'s' * (threads != 1)}"
    return text if form == "tensor" else f"{form}, {text}"


@contextmanager
def _chosen(specs: dict[str, dict[str, Any]], rounds: int) -> Iterator[list[Chosen]]:
    """Yield contestants sequentially, as preparing a graph needs several times its memory."""
    found: list[Chosen] = []
    try:
        for name, spec in specs.items():
            found.append(Chosen(name, spec, rounds))
        yield found
    finally:
        for each in found:
            each.close()


def _measured(specs: dict[str, dict[str, Any]], runs: int, others: dict[str, Any], steps: dict[str, Any]) -> Rows:
    """Choose settings, and measure the best ones in turns: steps, then epochs, each with ``others``' ones."""
    with _chosen(specs, runs + 1) as found:
        # A clock of the host does not measure a GPU's steps.
        timed = {name + STEP: each for name, each in zip(specs, found, strict=True) if specs[name]["device"] == "cpu"}
        stepped = measure({**{name: each.step if each.runs else None for name, each in timed.items()}, **steps}, runs)
        rows = measure({**{each.name: each if each.runs else None for each in found}, **others}, runs)
        for row in rows[len(found) :]:
            row["contestant"], row["model"] = GRAPHBOLT + NARROW * (NARROW in row["name"]), "SAGE"
        for row, each, (name, spec) in zip(rows, found, specs.items(), strict=False):
            row["contestant"], row["model"] = name, spec["model"]
            row["tried_ms_per_batch"] = {
                key: round(1e3 * value, 2) if math.isfinite(value) else "does not run"
                for key, value in each.tried.items()
            }
            if not each.runs:
                row["missing"] = "does not run"
        for row in stepped:
            model = specs[row["name"].removesuffix(STEP)]["model"] if row["name"] in timed else "SAGE"
            row |= {"contestant": row["name"], "model": model, "unit": "ms per step"}
    return rows + stepped


@contextmanager
def _graphbolt(sizes: dict[str, int], only: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Start GraphBolt's contestants: one per setting for epochs, and those of a step."""
    with tempfile.TemporaryDirectory() as name:
        specs = {}
        if graphbolt.python() and only in GRAPHBOLT:
            data = power_law_graph(sizes["nodes"], sizes["edges"], seed=0)
            where = graphbolt.write_graph(Path(name), indptr=data[0], indices=data[1].int())
            plain = {**sizes, "kind": "epoch", "folder": where, "fanouts": FANOUTS, "classes": CLASSES}
            for suffix, options in PRECISIONS.items():
                for chosen in ({"num_workers": 0, "torch_threads": num_cores()}, *settings("ours")):
                    specs[f"{GRAPHBOLT}{suffix}, {_named(chosen)}"] = {**plain, **options, **chosen}
                specs[GRAPHBOLT + suffix + STEP] = {**plain, **options, "step": STEPS}
        bolt = graphbolt.contestants(Path(name), specs) if specs else {GRAPHBOLT: None}
        steps = {name: each for name, each in bolt.items() if name.endswith(STEP)}
        try:
            yield {name: each for name, each in bolt.items() if name not in steps}, steps
        finally:
            for process in filter(None, bolt.values()):
                process.close()


def run(
    sizes: dict[str, int], runs: int, only: str = "", device: str = "cpu", models: Sequence[str] = ("SAGE",)
) -> Rows:
    """Run the contestants with ``only`` in their name; return their rows."""
    rows: Rows = []
    for model in models:
        named = {name: {**sizes, **spec, "device": device} for name, spec in contestants(model).items() if only in name}
        absent = [name for name, spec in named.items() if spec["library"] == "pyg" and not peers.can_sample()]
        rows += [{"name": name, "contestant": name, "model": model, "missing": MISSING} for name in absent]
        named = {name: spec for name, spec in named.items() if name not in absent}
        plain = f"PyG, {model}"
        with _graphbolt(sizes, only) if model == "SAGE" and device == "cpu" else nullcontext(({}, {})) as bolt:
            rows += _measured({name: spec for name, spec in named.items() if name != plain}, runs, *bolt)
        if plain in named:
            own = f"ours, {model}"
            pair = {name: named[name] for name in (own, plain) if name in named}
            few = [row for row in _measured(pair, min(runs, PLAIN_RUNS), {}, {}) if "unit" not in row]
            for row in few:
                row["name"] += " (rounds of its own)" * (row["contestant"] == own)
                row["contestant"] += ", beside the untrimmed" * (row["contestant"] == own)
            rows += few
    return rows


def comparisons(rows: Rows, label: str, targets: bool = True) -> list[dict[str, Any]]:
    """Compare ours with PyG's example with and without trimming, and our options with our float32."""

    def names(*contestants: str) -> list[str]:
        return [row["name"] for row in rows if row["contestant"] in contestants]

    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own, plain_target, trim_target = f"ours, {model}", *(TARGETS[model] if targets else (None, None))
        pairs = [
            ("PyG's LightningNodeData", f"{own}, beside the untrimmed", f"PyG, {model}", plain_target),
            ("PyG with trim_to_layer", own, f"PyG, {model}, trimmed", trim_target),
        ]
        for what, left, right, target in pairs:
            text = f"{label}, {model}, against {what}"
            found.append(compare(rows, text, names(left), names(right), False, target))
        low, bolt = own + NARROW, (GRAPHBOLT, GRAPHBOLT + NARROW)
        pairs = [
            (f"{model}{NARROW}, against float32", (low,), (own,)),
            (
                f"{model}{NARROW}, against PyG with trim_to_layer in bf16-mixed",
                (low,),
                (f"PyG, {model}, trimmed{NARROW}",),
            ),
        ]
        if model == "SAGE" and names(*bolt):
            pairs += [
                (f"{model}, against GraphBolt", (own,), bolt[:1]),
                (f"{model}{NARROW}, against GraphBolt in float32", (low,), bolt[:1]),
                (f"{model}{NARROW}, against GraphBolt in bf16-mixed", (low,), bolt[1:]),
            ]
        for what, left, right in pairs:
            found.append(compare(rows, f"{label}, {what}", names(*left), names(*right), False))
            step = compare(
                rows, f"Training step, one thread, {what}", names(*(name + STEP for name in left)),
                names(*(name + STEP for name in right)), False,
            )  # fmt: skip
            found.append({**step, "unit": "ms per step"})
    return found


def bounds(args: Any, limits: MachineLimits, rows: Rows) -> dict[str, Any]:
    """Return each model's lower bound of an epoch in seconds, from the machine's copy bandwidth and product rate.

    Beside it stand the times of one core that prepares a mini-batch, and of one that trains it.
    """
    data = make_data(args.nodes, args.edges, args.features, CLASSES)
    seeds = torch.randperm(args.nodes, generator=torch.Generator().manual_seed(0))[: args.train_nodes]
    datamodule = NeighborDataModule(
        data, seeds, num_neighbors=FANOUTS, batch_size=args.batch_size, num_workers=0, seed=0
    )
    torch.set_num_threads(1)
    batches, times = iter(datamodule.train_dataloader()), list[float]()
    batch, start = next(batches), time.perf_counter()
    while next(batches, None) is not None:
        times.append(1e3 * (time.perf_counter() - start))
        start = time.perf_counter()
    count = math.ceil(args.train_nodes / args.batch_size)
    found = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        found[model] = roofline(batch, (args.features, args.hidden, CLASSES), model, count, limits)
        measured = [row["median"] for row in rows if row["contestant"] == f"ours, {model}" and "median" in row]
        if measured:
            found[model]["measured over bound"] = round(statistics.median(measured) / found[model]["bound s"], 2)
        found[model]["ms of preparing, one core"] = round(statistics.median(times), 2) if times else math.nan
        for suffix, precision in (("", "float32"), (NARROW, "bf16-mixed")):
            name = f"ours, {model}{suffix}{STEP}"
            step = [row["median"] for row in rows if row["contestant"] == name and "median" in row]
            found[model] |= {f"ms of a step, one core, {precision}": step[0]} if step else {}
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("epoch", __doc__, SIZES, argv)
    described = graphbolt.machine()
    limits = {count: measure_limits(count) for count in sorted({1, num_cores()})}
    rows = run(args.sizes, args.runs, args.only, models=tuple(MODELS))
    compared = comparisons(rows, "Training epoch")
    result = {
        "benchmark": "epoch",
        "title": f"Training epoch, {args.nodes:,} nodes, {args.edges:,} edges, {args.train_nodes:,} seeds",
        "unit": "s per epoch",
        "settings": {**args.sizes, "fanouts": FANOUTS, "layers": 2, "heads": 4, "classes": CLASSES, "runs": args.runs},
        "machine": described,
        "machine limits": {count: asdict(each) for count, each in limits.items()},
        "roofline": bounds(args, limits[num_cores()], rows),
        "rows": rows,
        "comparisons": compared,
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()

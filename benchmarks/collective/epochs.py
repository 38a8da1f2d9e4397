"""Collective batching against CPU-only, GPU-only and randomly split batching (after MorphGL's evaluation).

On a GPU: GraphSAGE, GCN and GAT with fanouts 15, 10, 5 and 1024 seeds; the process is pinned to 2 to 16 cores; topology
and features are in pinned memory, with a cache of ``--cache-rows`` hot rows (see ``benchmarks.collective.gpu``). Cells
are measured until ``--limit`` seconds have passed; ``--merge`` retains those of an earlier run.

Without a GPU: preparation in threads against preparation in the training thread, through ``pl.Trainer``, with one
process per contestant; then the paper's setting with real threads and schedules, but sleeping stages, so that any
number of cores can be simulated. Predicted epochs are reported next to the measured ones.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import pytorch_lightning as pl
import torch

from benchmarks import peers
from benchmarks.collective import sleeping
from benchmarks.harness import Gate, Rows, compare, machine, measure_isolated, parse, publish
from benchmarks.papers.morphgl import SAMPLING_SHARE
from benchmarks.sampling.minibatch import make_data
from benchmarks.timed_epochs import TimedEpochs
from lightning_gnn.collective.datamodule import CollectiveDataModule
from lightning_gnn.collective.plan import Duration, StageTimes
from lightning_gnn.collective.simulate import simulate_dual_buffer
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.runtime.devices import num_cores
from lightning_gnn.runtime.timeline import Timeline

CLASSES = 32
FANOUTS = [15, 10, 5]
CORES = (2, 4, 8, 12, 16)
HERE = (16, 8, 4)
"""Numbers of cores in ``benchmarks.gpu.everything``."""
SIZES = {
    "nodes": (600_000, 5_000),
    "edges": (12_000_000, 50_000),
    "features": (32, 8),
    "hidden": (16, 8),
    "batch_size": (1024, 64),
    "batches": (40, 16),
    "sleeping_batches": (220, 22),
    "slower": (10, 40),
}
GPU_SIZES = {
    "nodes": (2_000_000, 100_000),
    "edges": (60_000_000, 2_000_000),
    "features": (128, 32),
    "batch_size": (1024, 128),
    "batches": (48, 24),
    "cache_rows": (200_000, 10_000),
    "sweep_batch_size": (256, 32),
    "limit": (380, 60),
}
OURS = "ours, a worker thread, 1 torch thread"
BOTH = "ours, both routes on the CPU, 1 torch thread"
TRAINING_THREAD: dict[str, dict[str, Any]] = {
    "training thread, 1 torch thread": {"way": "training thread", "torch_threads": 1},
    "training thread, 2 torch threads": {"way": "training thread", "torch_threads": 2},
}
CONTESTANTS: dict[str, dict[str, Any]] = {
    OURS: {"way": "threads", "torch_threads": 1},
    BOTH: {"way": "both", "torch_threads": 1},
    **TRAINING_THREAD,
    "PyG, 1 worker process, 1 torch thread": {"way": "PyG", "torch_threads": 1},
}


class Notes(pl.Callback):
    """Writes the predicted epoch time to a file: the plan's, or a simulation from the previous epoch's stage times."""

    def __init__(self, path: str, datamodule: CollectiveDataModule) -> None:
        self._path = Path(path)
        self._datamodule = datamodule
        self._predicted: list[float] = []
        self._same: list[float] = []
        self._start = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the epoch if the loader does not measure by itself."""
        loader: Any = trainer.train_dataloader
        if loader.prefetcher.route is None:
            loader.prefetcher.timeline = Timeline()
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Predict the next epoch."""
        seconds = time.perf_counter() - self._start
        loader: Any = trainer.train_dataloader
        plan = self._datamodule.plan
        if plan is None:
            return
        if loader.prefetcher.timeline is not None:
            times = stage_times(loader.prefetcher.timeline, loader.num_threads)
            self._predicted.append(simulate_dual_buffer(times, plan, len(loader)).makespan)
            self._same.append(seconds / self._predicted[-1] - 1)
        elif plan.times is not None:
            times = plan.times
            self._predicted = [plan.epoch_s["collective"]]
        else:
            return
        stages = {name: getattr(times, name).mean for name in ("cpu_batching", "gpu_batching", "uva", "model")}
        predicted = median(self._predicted[:-1] or self._predicted)  # no epoch follows the last one
        notes = {"mode": plan.mode, "buffers": plan.buffers, "stages_s": stages, "predicted_s": predicted}
        if self._same:  # this error excludes changes of the machine's other load
            notes["error_with_stages_of_the_same_epoch"] = round(median(self._same), 4)
        self._path.write_text(json.dumps(notes))


def stage_times(timeline: Timeline, workers: int) -> StageTimes:
    """Return means and spreads of a CPU pipeline's recorded stages, without warm-up and outliers."""
    found = {}
    for stage in ("cpu_batching", "model"):
        values = [item.end - item.start for item in timeline.intervals if item.stage == stage][2:]
        values = [value for value in values if value <= 3 * median(values)]
        found[stage] = Duration(fmean(values), pstdev(values))
    nothing = Duration(0.0)
    return StageTimes(**found, dma=nothing, gpu_batching=nothing, uva=nothing, cpu_workers=workers)


def make(spec: dict[str, Any]) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    """Return the model and the DataModule of one contestant."""
    pl.seed_everything(0, verbose=False)
    data = make_data(spec["nodes"], spec["edges"], spec["features"], CLASSES)
    seeds = torch.randperm(spec["nodes"])[: spec["batches"] * spec["batch_size"]]
    kwargs: dict[str, Any] = {"num_neighbors": FANOUTS, "batch_size": spec["batch_size"]}
    model = NodeClassifier(GraphSAGE(spec["features"], spec["hidden"], 3, CLASSES), CLASSES)
    if spec["way"] == "training thread":
        return model, NeighborDataModule(data, seeds, num_workers=0, **kwargs)
    if spec["way"] == "PyG":
        return model, peers.PyGNodeData(data, seeds, num_workers=1, **kwargs)
    if spec["way"] == "both":
        kwargs |= {"gpu_route": "cpu", "profile_batches": 4, "gpu_buffer_size": 4}
    return model, CollectiveDataModule(data, seeds, num_workers=1, **kwargs)


def contestant(spec: dict[str, Any], gate: Gate) -> None:
    """Train for one epoch per round."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(spec["torch_threads"])
    model, datamodule = make(spec)
    callbacks: list[pl.Callback] = [TimedEpochs(gate)]
    if isinstance(datamodule, CollectiveDataModule):
        callbacks.append(Notes(spec["notes"], datamodule))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=gate.rounds,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(model, datamodule)


def train(sizes: dict[str, int], runs: int, only: str) -> tuple[Rows, list[dict[str, Any]]]:
    """Train on the CPU in turns; return the rows, and pairs of measured and predicted epoch times."""
    with tempfile.TemporaryDirectory() as folder:
        specs: dict[str, dict[str, Any] | None] = {}
        for number, (name, chosen) in enumerate(CONTESTANTS.items()):
            if only in name:
                able = chosen["way"] != "PyG" or peers.can_sample()
                specs[name] = {**sizes, **chosen, "notes": f"{folder}/{number}.json"} if able else None
        rows = measure_isolated(contestant, specs, runs)
        predictions = []
        for row in rows:
            path = Path((specs[row["name"]] or {}).get("notes", folder))
            if path.is_file():
                notes = json.loads(path.read_text())
                error = round(row["median"] / notes["predicted_s"] - 1, 4)
                predictions.append({"name": row["name"], "measured_s": row["median"], "error": error, **notes})
    return rows, predictions


def comparisons(rows: Rows, names: dict[int, dict[str, list[str]]], label: str) -> list[dict[str, Any]]:
    """Compare collective batching with the others for each number of cores."""

    def against(peers: Sequence[str], target: float | None, what: str) -> dict[int, dict[str, Any]]:
        found = {}
        for cores, ways in names.items():
            others = [name for peer in peers for name in ways[peer]]
            text = f"{label}, {what}, {cores} cores"
            found[cores] = compare(rows, text, ways["collective"], others, False, target)
        return {cores: one for cores, one in found.items() if "ratio" in one}

    better = against(("CPU-only", "GPU-only"), 0.97, "against the better one where that is hardest")
    meeting = against(("CPU-only", "GPU-only"), 1.2, "against the better one where the two meet")
    cpu = against(("CPU-only",), 1.4, "against CPU-only at its worst")
    gpu = against(("GPU-only",), 1.4, "against GPU-only at its worst")
    split = against(("random split",), None, "against the random split at its best")
    if not better or not cpu or not gpu:
        return []
    apart = {n: max(cpu[n]["medians"][1], gpu[n]["medians"][1]) / min(cpu[n]["medians"][1], gpu[n]["medians"][1])
             for n in better if n in cpu and n in gpu}  # fmt: skip
    found = [
        min(better.values(), key=lambda one: one["ratio"]),
        *([meeting[min(apart, key=lambda n: apart[n])]] if apart else []),
        max(cpu.values(), key=lambda one: one["ratio"]),
        max(gpu.values(), key=lambda one: one["ratio"]),
    ]
    return [*found, *([min(split.values(), key=lambda one: one["ratio"])] if split else [])]


def on_cpu(args: argparse.Namespace) -> dict[str, Any]:
    """Run the measurements and simulations that do not require a GPU."""
    described = machine()
    rows, predictions = train(args.sizes, args.runs, args.only)
    what = "Training epoch on the CPU, a worker thread against the training thread"
    compared = [
        compare(rows, what, [OURS], list(TRAINING_THREAD), False, 1.2),
        compare(rows, f"{what}, 1 torch thread each", [OURS], list(TRAINING_THREAD)[:1], False),
    ]
    cores = [int(count) for count in args.cores.split(",")] if args.cores else CORES[: 2 if args.quick else None]
    asleep: list[dict[str, Any]] = []
    if args.only in sleeping.ASLEEP:
        slept, asleep = sleeping.sleep(cores, args.sleeping_batches, args.slower, args.runs)
        rows += slept
        names = {count: {way: [sleeping.row_name(way, count)] for way in sleeping.WAYS} for count in cores}
        compared += comparisons(rows, names, "Collective batching, stages sleep")
        for cell in asleep:
            name = sleeping.row_name("collective", cell["cores"])
            figures = {"measured_s": cell["measured_s"]["collective"], "predicted_s": cell["predicted_s"]}
            predictions.append({"name": name, **figures, "error": cell["error"]})
    return {
        "benchmark": "collective",
        "title": f"Collective batching, GraphSAGE on the CPU, and the paper's stages asleep, 1/{args.slower} as long",
        "unit": "s per epoch",
        "settings": {
            **args.sizes,
            "fanouts": FANOUTS,
            "runs": args.runs,
            "asleep": f"{sleeping.SETTING}; threads and schedules are real, the stages sleep",
            "assumed": f"{SAMPLING_SHARE:.0%} of the GPU's batching is sampling, which no cache shortens",
            "durations_s": {count: described_times(sleeping.paper_times(count, 1 / args.slower)) for count in cores},
        },
        "machine": described,
        "rows": rows,
        "comparisons": compared,
        "predictions": predictions,
        "largest_error": max((abs(one["error"]) for one in predictions), default=None),
        "asleep": asleep,
    }


def described_times(times: StageTimes) -> dict[str, float]:
    """Return the mean of each stage, in seconds."""
    names = ("cpu_batching", "dma", "gpu_batching", "uva", "model")
    return {**{name: round(getattr(times, name).mean, 6) for name in names}, "workers": times.cpu_workers}


def on_gpu(args: argparse.Namespace) -> dict[str, Any]:
    """Measure on the GPU cell by cell, and write the file after each."""
    from benchmarks.collective import gpu

    described = machine()
    models = args.models.split(",") if args.models else list(gpu.KINDS)[: 1 if args.quick else None]
    cores = [int(count) for count in args.cores.split(",")] if args.cores else CORES[: 2 if args.quick else None]
    earlier = json.loads(Path(args.merge).read_text()) if args.merge else {"cells": [], "figure 9": {}}
    result: dict[str, Any] = {
        "benchmark": "gpu_collective",
        "title": f"Collective batching on a GPU, {args.nodes:,} nodes, {args.edges:,} edges, {args.features} features, "
        f"{args.cache_rows:,} of them cached",
        "unit": "s per epoch",
        "settings": {**args.sizes, "fanouts": FANOUTS, "hidden": gpu.HIDDEN, "runs": args.runs},
        "machine": described,
        "cells": earlier["cells"],
        "figure 9": earlier["figure 9"],
    }
    if args.merge and earlier["settings"] | {"limit": 0} != result["settings"] | {"limit": 0}:
        raise SystemExit(f"collective: {args.merge} was measured with other settings; use the same sizes and runs")

    def keep(cell: dict[str, Any]) -> None:
        others = [one for one in result["cells"] if (one["model"], one["cores"]) != (cell["model"], cell["cores"])]
        result["cells"] = sorted([*others, cell], key=lambda one: (one["model"], one["cores"]))
        finish(result)
        medians = ", ".join(f"{row['name']} {row['median']:g}" for row in cell["rows"])
        print(f"{medians}; {cell['mode']} {cell['buffers']}, error {cell['error']}", flush=True)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=2) + "\n")

    bench = gpu.Bench(args.sizes, torch.device("cuda", torch.cuda.current_device()))
    if models[0] not in result["figure 9"] and not args.only:
        result["figure 9"][models[0]] = bench.buffers(models[0], max(cores), args.sweep_batch_size, args.runs)
    result["skipped"] = gpu.cells(bench, models, cores, args.runs, args.only, args.limit, keep)
    return finish(result)


def measure_here(
    graph: Any, runs: int, tiny: bool, limit: float, earlier: dict[str, Any], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure the CPU alone, the GPU alone and both by plan on a given graph, cell by cell, in this process.

    Args:
        graph: A :class:`benchmarks.gpu.one_graph.OneGraph`.
        tiny: Profile few mini-batches.
        limit: Seconds after which no cell begins.
        earlier: Results of an earlier call, whose cells are kept.
        keep: Is given the results so far after each cell.
    """
    from benchmarks.collective import gpu

    sizes = {name: getattr(graph, name) for name in ("nodes", "edges", "features", "batch_size")}
    sizes |= {"batches": min(60, graph.nodes // graph.batch_size), "cache_rows": graph.nodes // 12}
    result: dict[str, Any] = {
        "title": f"Collective batching on a GPU, GraphSAGE, {graph.nodes:,} nodes, {graph.edges:,} edges, features in "
        "pinned memory",
        "unit": "s per epoch", "settings": {**sizes, "runs": runs},
        **{key: [*earlier.get(key, ())] for key in ("cells", "rows", "comparisons")},
    }  # fmt: skip

    def add(cell: dict[str, Any]) -> None:
        ours, *others = [row["name"] for row in cell["rows"]]
        what = f"Collective batching, {cell['model']}, {cell['cores']} cores, against the better of CPU and GPU alone"
        result["cells"].append(cell)
        result["rows"] += cell["rows"]
        result["comparisons"].append(compare(cell["rows"], what, [ours], others, False))
        keep(result)

    bench = gpu.Bench(sizes, graph.device, 1 if tiny else 10, graph.data)
    cores = [count for count in HERE if count <= num_cores()] or [num_cores()]
    cores = [count for count in cores if count not in [cell["cores"] for cell in result["cells"]]]
    skipped = gpu.cells(bench, ["GraphSAGE"], cores, runs, "only", limit, add, is_watched=False)
    return {**result, "skipped": skipped, "finished": not skipped}


def finish(result: dict[str, Any]) -> dict[str, Any]:
    """Collect rows, comparisons and predictions from the measured cells."""
    cells: list[dict[str, Any]] = result["cells"]
    rows: Rows = [row for cell in cells for row in cell["rows"]]
    compared: list[dict[str, Any]] = []
    for model in dict.fromkeys(cell["model"] for cell in cells):
        names = {}
        for cell in cells:
            if cell["model"] == model:
                own = [row["name"] for row in cell["rows"]]
                names[cell["cores"]] = {way: [name for name in own if way in name] for way in sleeping.WAYS}
        compared += comparisons(rows, names, f"Collective batching on a GPU, {model}")
    errors = [abs(cell["error"]) for cell in cells if cell["error"] is not None]
    planning = max((cell["planning"]["epochs"] for cell in cells), default=None)
    more = {"largest_error": max(errors, default=None), "most_epochs_of_planning": planning}
    result.update(rows=rows, comparisons=compared, **more)
    return result


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    there = torch.cuda.is_available()
    options = {"cores": "numbers of CPU cores, separated by commas (default: 2,4,8,12,16)"}
    if there:
        options["models"] = "GraphSAGE, GCN, GAT or some of them, separated by commas"
        options["merge"] = "JSON file of an earlier run whose cells are kept unless they are measured again"
    args = parse("gpu_collective" if there else "collective", __doc__, GPU_SIZES if there else SIZES, argv, 3, options)
    result = on_gpu(args) if there else on_cpu(args)
    if args.out is not None:
        sleeping.draw(result, args.out.with_suffix(".png"))
    publish(result, args.out)
    for key in ("largest_error", "most_epochs_of_planning"):
        if result.get(key) is not None:
            print(f"{key}: {result[key]:g}")
    return result


if __name__ == "__main__":
    main()

"""Hybrid training against the accelerator alone: the paper's figure 11, the performance model, the pipeline's cost.

For each speed of the accelerator, relative to the CPU trainer: the accelerator alone (PyG's NeighborLoader under a
plain Trainer, and this package's loader and strategy without CPU trainers), the hybrid with the performance model's
mapping, with the resource manager on top, and with two-stage prefetching on top. Three-layer GraphSAGE, fanouts 15, 10
and 5. The figure is milliseconds per iteration of an epoch, the filling of the pipeline included, after epochs that do
not count.

With a GPU it is the accelerator, as fast as it is and slowed down: it waits after the forward pass, and before the
backward pass, for a time for each seed. Without one the accelerator is simulated: its step, and its transfers, are
waits and nothing else, since there is no core to spare for them. What is sampled and loaded for it, its part in the
synchronisation and all that the CPU trainer does is real; its gradient is zero. So these figures show what scheduling
gains, not how fast an accelerator is. MTEPS count the edges of all trainers' mini-batches (the paper's equation 5);
since vertices that they share are sampled by each, milliseconds are the fairer figure.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import peers
from benchmarks.harness import compare, measure_isolated, parse, publish
from benchmarks.hyscale_contestants import contestant
from benchmarks.hyscale_model import (
    calibrated,
    draw,
    paper_link,
    platform_of,
    predicted,
    scaling,
    transferred_bytes,
    with_accelerator,
    workload_of,
)
from benchmarks.machine import machine
from lightning_gnn.hyscale.mapping import TaskMapping
from lightning_gnn.hyscale.model import PerformanceModel
from lightning_gnn.hyscale.options import num_cores

SIZES = {
    "nodes": (200_000, 2_000),
    "edges": (4_000_000, 20_000),
    "features": (100, 16),
    "hidden": (384, 16),
    "batch_size": (1024, 64),
    "iterations": (20, 4),
    "settle": (6, 1),
}
FANOUTS = (15, 10, 5)
SPEEDS = (2, 4, 8)
"""How many times as fast as the CPU trainer the slowed-down or simulated accelerator is."""
PYG = "PyG, accelerator only"
ALONE, ALONE_TFP = "ours, accelerator only", "ours, accelerator only, two-stage prefetch"
HYBRID = "ours, + two-stage prefetch"
VARIANTS: dict[str, dict[str, Any]] = {
    PYG: {"library": "pyg", "trainer": "plain", "prefetch": 1},
    ALONE: {"cpu_trainers": 0, "prefetch": 1},
    ALONE_TFP: {"cpu_trainers": 0, "prefetch": 2},
    "ours, static hybrid": {"cpu_trainers": 1, "prefetch": 1},
    "ours, + DRM": {"cpu_trainers": 1, "prefetch": 1, "drm": True},
    HYBRID: {"cpu_trainers": 1, "prefetch": 2, "drm": True},
}
SAMPLING = "ours, + sampling on the accelerator"
ON_GPU = {SAMPLING: {"cpu_trainers": 1, "prefetch": 2, "drm": True, "accelerator_sampling": "auto"}}
"""What a simulated accelerator cannot do."""
LONG_STEP = 0.035
"""Seconds that a step on the GPU is made to last, for the cost of the pipeline on steps of at least 30 ms."""
MORE_RUNS = 3
"""Times as many rounds count for the cost of the pipeline, which is smaller than the differences of a few."""
Notes = dict[str, dict[str, Any]]


def run(specs: dict[str, dict[str, Any] | None], runs: int) -> tuple[list[dict[str, Any]], Notes]:
    """Measure contestants; returns their rows, and their notes by name."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{number}.json" for number, name in enumerate(specs)}
        rows = measure_isolated(
            contestant, {name: spec and {**spec, "notes": str(files[name])} for name, spec in specs.items()}, runs
        )
        notes = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    return rows, notes


def default_threads(cores: int) -> tuple[int, int, int]:
    """Return CPU threads of Sampling, Feature Loading and the CPU trainer."""
    few = max(1, cores // 8)
    return few, few, max(1, cores - 2 * few)


def calibrate(common: dict[str, Any]) -> Notes:
    """Train on the CPU alone, and on the GPU alone where there is one; return what was noted."""
    shared = {**common, "trainer": "hyscale", "library": "ours", "prefetch": 2, "settle": 1}
    specs = {"CPU": {**shared, "accelerator": False, "cpu_trainers": 1, "describe": True}}
    if common["device"] == "cuda":
        specs["GPU"] = {**shared, "accelerator": True, "cpu_trainers": 0}
    return {what: run({what: spec}, 1)[1][what] for what, spec in specs.items()}


def speeds(notes: Notes, seeds: int, link: float | None) -> dict[str, dict[str, float]]:
    """Return the accelerators to measure: how fast they are, and how long they and their links wait.

    Args:
        notes: Of :func:`calibrate`.
        seeds: Of an iteration.
        link: Bytes that an iteration sends to a simulated accelerator; None for a real one.
    """
    cpu = notes["CPU"]["stages"]["train_cpu"]
    own = notes["GPU"]["stages"]["train_accelerator"] if "GPU" in notes else 0.0
    found = {"as fast as it is": {"speed": cpu / own, "seconds_per_seed": 0.0}} if own else {}
    for speed in SPEEDS:
        if cpu / speed > own:
            found[f"{speed}x the CPU trainer"] = {"speed": speed, "seconds_per_seed": (cpu / speed - own) / seeds}
    for chosen in found.values():
        if link is not None:
            chosen["link"] = link / (paper_link() * cpu / chosen["speed"])
    return found


def figure_11(common: dict[str, Any], notes: Notes, label: str, chosen: dict[str, float], runs: int, only: str) -> Any:
    """Measure all variants with one accelerator; returns rows, comparisons, and what the model predicted."""
    workload, threads = workload_of(notes["CPU"]), tuple(common["threads"])
    seeds = common["batch_size"]
    link = chosen.get("link") or transferred_bytes(workload) / notes["GPU"]["stages"]["transfer"]
    models = {
        name: PerformanceModel(with_accelerator(platform, threads[2], chosen["speed"], link), workload)
        for name, platform in (("calibrated", calibrated(notes["CPU"])), ("short", platform_of(notes["CPU"])))
    }
    model = models["calibrated"]
    best = model.best_mapping(1, sum(threads))
    alone = TaskMapping((seeds,), 0, (*threads[:2], 0))
    specs: dict[str, dict[str, Any] | None] = {}
    variants = VARIANTS | (ON_GPU if common["device"] == "cuda" else {})
    for variant, options in variants.items():
        name = f"{variant}, {label}"
        if only not in name:
            continue
        spec = {**common, **chosen, "trainer": "hyscale", "library": "ours", "accelerator": True, **options}
        if "link" in chosen:
            spec["sync_seconds"] = model.sync_time()
        if spec.get("cpu_trainers"):
            spec |= {"shares": best.shares, "threads": best.threads}
        specs[name] = spec if spec["library"] == "ours" or peers.can_sample() else None
    rows, noted = run(specs, runs)
    medians = {row["name"]: row["median"] for row in rows if "median" in row}
    predictions = []
    for variant, options in variants.items():
        name = f"{variant}, {label}"
        if name not in medians:
            continue
        entry = {"name": name, "ms": medians[name], "mteps": noted[name]["edges"] / medians[name] / 1e3}
        if "cpu_trainers" in options:
            final = alone
            if options["cpu_trainers"]:
                final = TaskMapping(tuple(noted[name]["seeds"]), 1, tuple(noted[name]["threads"]))
            entry |= {"mapping": str(final), "stages": noted[name]["stages"], "decisions": noted[name]["decisions"]}
            for which, predicting in models.items():
                milliseconds = 1e3 * predicted(predicting, final, options["prefetch"])
                entry[f"predicted_ms_{which}"] = milliseconds
                entry[f"error_{which}"] = milliseconds / medians[name] - 1
        predictions.append(entry)
    gain = predicted(model, alone, 2) / predicted(model, best, 2)
    ours = [f"{variant}, {label}" for variant in (HYBRID, SAMPLING)]
    peers_alone = [f"{ALONE}, {label}", f"{ALONE_TFP}, {label}"]
    what, target = f"Hybrid training, accelerator {label}", max(0.98, 0.9 * gain)
    comparisons = [
        compare(rows, f"{what}, against it alone", ours, peers_alone, False, target),
        compare(rows, f"{what}, against PyG on it alone", ours, [f"{PYG}, {label}"], False),
    ]
    found = {"mapping": str(best), "predicted_gain": gain, "variants": predictions}
    if "ratio" in comparisons[0]:
        found["measured_gain"] = comparisons[0]["ratio"]
        found["reached"] = comparisons[0]["ratio"] / gain
    return rows, comparisons, found


def pipeline_cost(common: dict[str, Any], runs: int, only: str) -> tuple[list[dict[str, Any]], list[Any], Any]:
    """Set the four stages with one trainer against the plain threaded loader, on long steps and on short ones."""
    accelerator = common["device"] == "cuda"
    batch, iterations = common["batch_size"], common["iterations"]
    lengths: dict[str, dict[str, Any]] = {
        "long steps": {"batch_size": max(1, batch // 4), "iterations": 2 * iterations},
        "short steps": {"batch_size": max(1, batch // 256), "iterations": 16 * iterations},
    }
    if accelerator:
        lengths["long steps"]["seconds_per_seed"] = LONG_STEP / lengths["long steps"]["batch_size"]
    rows: list[dict[str, Any]] = []
    comparisons, found = [], {}
    for length, options in lengths.items():
        spec = {**common, **options, "library": "ours", "accelerator": accelerator, "prefetch": 2, "settle": 1}
        plain, stages = f"ours, plain loader, {length}", f"ours, four stages, {length}"
        specs = {
            plain: {**spec, "trainer": "plain"},
            stages: {**spec, "trainer": "hyscale", "cpu_trainers": 0 if accelerator else 1},
        }
        more, _ = run({name: one for name, one in specs.items() if only in name}, runs)
        rows += more
        target = 1 / 1.03 if length == "long steps" else None
        comparison = compare(more, f"The four-stage pipeline on {length}", [stages], [plain], False, target, True)
        comparisons.append(comparison)
        if "ratio" in comparison:
            found[length] = added(*(row["values"] for name in (plain, stages) for row in more if row["name"] == name))
    return rows, comparisons, found


def added(plain: list[float], stages: list[float]) -> dict[str, float]:
    """Return what the four stages add to a step: medians over the rounds, in which both took turns.

    Args:
        plain: Milliseconds per step with the plain loader, of each round.
        stages: Those with four stages.
    """
    rounds = list(zip(plain, stages, strict=True))
    return {
        "plain_ms": median(plain),
        "four_stages_ms": median(stages),
        "added_ms": median(ours - other for other, ours in rounds),
        "added": median(ours / other for other, ours in rounds) - 1,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("hyscale", __doc__, SIZES, argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cores, described = num_cores(), machine()
    threads = default_threads(cores)
    common = {
        **args.sizes,
        "device": device,
        "fanouts": list(FANOUTS),
        "threads": list(threads),
        "torch_threads": threads[2],
        "num_workers": max(2, threads[0] + threads[1]),
    }
    notes = calibrate(common)
    sent = None if device == "cuda" else transferred_bytes(workload_of(notes["CPU"]))
    chosen = speeds(notes, args.batch_size, sent)
    if args.quick:
        chosen = dict(list(chosen.items())[:1])
    rows: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    ablation: dict[str, Any] = {}
    for label, options in chosen.items():
        more, compared, ablation[label] = figure_11(common, notes, label, options, args.runs, args.only)
        rows, comparisons = rows + more, comparisons + compared
    more, compared, cost = pipeline_cost(common, MORE_RUNS * args.runs, args.only)
    rows, comparisons = rows + more, comparisons + compared
    study = scaling(args.quick)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        draw(
            {label: speedups(found["variants"]) for label, found in ablation.items()},
            study,
            args.out.with_suffix(".png"),
        )
    result = {
        "benchmark": "hyscale",
        "title": f"Hybrid training, GraphSAGE, {args.batch_size} seeds an iteration, "
        + ("the accelerator a GPU" if device == "cuda" else "the accelerator simulated"),
        "unit": "ms per iteration",
        "settings": {**args.sizes, "fanouts": list(FANOUTS), "threads": list(threads), "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": comparisons,
        "extra": {
            "accelerator": "GPU; slowed down by waits" if device == "cuda" else _SIMULATED,
            **{f"accelerator {label}": summary(found) for label, found in ablation.items()},
            "four-stage pipeline": cost,
        },
        "measured_alone": {what: noted["stages"] for what, noted in notes.items()},
        "accelerators": chosen,
        "figure_11": ablation,
        "scaling": study,
    }
    return publish(result, args.out)


def speedups(variants: list[dict[str, Any]]) -> dict[str, float]:
    """Return how many times as fast as our accelerator-only run each variant is."""
    times = {entry["name"].rsplit(", ", 1)[0]: entry["ms"] for entry in variants}
    return {name: times[ALONE] / time for name, time in times.items()} if ALONE in times else {}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one accelerator in short."""
    figures: dict[str, Any] = {
        name: found[name] for name in ("mapping", "predicted_gain", "measured_gain", "reached") if name in found
    }
    figures["mteps"] = {entry["name"].rsplit(", ", 1)[0]: round(entry["mteps"], 3) for entry in found["variants"]}
    errors = {entry["name"].rsplit(", ", 1)[0]: entry.get("error_calibrated") for entry in found["variants"]}
    figures["error of the prediction"] = {name: f"{error:+.1%}" for name, error in errors.items() if error is not None}
    return figures


_SIMULATED = (
    "simulated: its steps and its transfers are waits without work, its gradient is zero; sampling, feature loading, "
    "the CPU trainer and the synchronisation are real"
)


if __name__ == "__main__":
    main()

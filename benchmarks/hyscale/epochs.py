"""Hybrid training against the accelerator alone: the paper's figure 11, and further ablations.

``--parts`` selects some of these parts; results of other parts in the JSON file are retained:

- ``admission``: for each speed of the accelerator, relative to the CPU trainer: the default options, which start a CPU
  trainer only where the model predicts that it pays, against the accelerator alone.
- ``ablation``: for each speed of the accelerator, relative to the CPU trainer: the accelerator alone (PyG's
  NeighborLoader with a plain Trainer, and ours), the hybrid with its initial mapping, with the resource manager (as
  published, and ours), with two-stage prefetching, and with every step on a CPU trainer that is left out. Each is
  reported with the performance model's predictions, from the speeds of a CPU-only run and from the strategy's own short
  measurements.
- ``sum``: the hybrid against the sum of its trainers' rates, each alone on the cores that it has in the hybrid.
- ``sleeping``: the same for four accelerators that are each weaker than the CPU trainer. All steps sleep, for a second,
  as if each trainer had cores of its own: on two cores, the Python of five ranks takes 40 ms of a step.
- ``disturbance``: a core is blocked for part of the run, or the accelerator is slow for a while.
- ``sweep``: manual shares of the CPU trainer, and the automatic one.
- ``lone``: a single trainer with the strategy against the plain Trainer.

Three-layer GraphSAGE, fanouts 15, 10 and 5. The figure is milliseconds per iteration of an epoch, including filling the
pipeline, after warm-up epochs. Every contestant is a script whose ranks Lightning starts, with the default options:
``cpu_share="auto"``, threads, and the model. Contestants run in turns, epoch by epoch, and ratios have 95 % intervals
over these rounds. A static mapping has the threads with which a manager starts, so that the manager's gain does not
include that of other threads: by default, its CPU trainer would have all cores.

A GPU, if available, is slowed down by waits. Otherwise the accelerator is simulated: rank 0 launches kernels, which
holds the interpreter lock like real launches, and waits for them; no core executes them. Its mini-batches are sampled
and loaded, pass a link with the paper's ratio of transfer to step time, and its gradient (zero) is all-reduced. The
strategy is given the accelerator's speed, since a wait cannot be measured; it measures everything else. PyG's
transfers, which PrefetchLoader overlaps, cost nothing without a device. These figures therefore show the gain of
scheduling, not the speed of an accelerator.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch

from benchmarks import peers
from benchmarks.harness import Rows, add_ratios, compare, machine, measure, parse, publish, ratio_of_rounds, shortened
from benchmarks.hyscale.model import (
    calibrated,
    paper_link,
    platform_of,
    predicted,
    transferred_bytes,
    with_accelerator,
    workload_of,
)
from benchmarks.scripts import Script
from lightning_gnn.hyscale.analytic import PerformanceModel
from lightning_gnn.hyscale.costs import TaskMapping, split_seeds
from lightning_gnn.runtime.devices import num_cores

SIZES = {
    "nodes": (200_000, 2_000),
    "edges": (4_000_000, 20_000),
    "features": (100, 16),
    "hidden": (128, 16),
    "batch_size": (1024, 64),
    "iterations": (64, 4),
    "settle": (2, 1),
}
FANOUTS = (15, 10, 5)
SPEEDS = (2, 4, 8)
"""Speeds of the slowed-down or simulated accelerator, relative to the CPU trainer."""
SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
"""CPU shares of the sweep."""
ACCELERATORS, SLEEPING_RATES = 4, (200.0, 320.0)
"""Number of sleeping accelerators; seeds per second of each and of the CPU trainer."""
MORE_RUNS = 4
"""Additional rounds of a single trainer: the strategy's overhead is smaller than the variation over a few rounds."""
MODULE = "benchmarks.hyscale.contestants"
PYG, ALONE, ALONE_TFP = "PyG, accelerator only", "ours, accelerator only", "ours, accelerator only, two-stage prefetch"
STATIC, PUBLISHED, OURS, FORCED, HYBRID = (
    "ours, static hybrid",
    "ours, + DRM as published",
    "ours, + DRM",
    "ours, + two-stage prefetch",
    "ours, default options",
)
VARIANTS: dict[str, dict[str, Any]] = {
    PYG: {"library": "pyg", "trainer": "plain", "settle": 1},
    ALONE: {"options": {"cpu_trainers": 0, "prefetch": 1}},
    ALONE_TFP: {"options": {"cpu_trainers": 0}},
    STATIC: {"options": {"cpu_trainers": 1, "drm": False, "prefetch": 1}},
    PUBLISHED: {"options": {"cpu_trainers": 1, "drm": "paper", "prefetch": 1}},
    OURS: {"options": {"cpu_trainers": 1, "prefetch": 1}},
    FORCED: {"options": {"cpu_trainers": 1}},
}
Notes = dict[str, dict[str, Any]]
Found = dict[str, Any]
"""Result of a part: ``rows`` and ``comparisons`` for publication, and its own figures."""


def compete(
    common: dict[str, Any], contestants: dict[str, dict[str, Any]], runs: int, kinds: Sequence[str | None] = (None,)
) -> list[tuple[Rows, Notes]]:
    """Run the contestants in turns, fit by fit; return the rows and notes of each fit."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scripts: dict[str, Script | None] = {}
        notes: dict[str, Path] = {}
        for number, (name, own) in enumerate(contestants.items()):
            spec = completed({**common, **own}, (runs + 1) * len(kinds), Path(folder) / f"notes {number}")
            notes[name], count = Path(folder) / f"notes {number}", len(spec["fits"])
            scripts[name] = None
            if spec["library"] != "pyg" or peers.can_sample():
                scripts[name] = script = Script(MODULE, spec, Path(folder), str(number))
                stack.callback(script.close)
        return [take_turns(scripts, notes, index, runs, kinds) for index in range(count)]


def completed(spec: dict[str, Any], turns: int, notes: Path) -> dict[str, Any]:
    """Return the complete settings of a script, whose fits write files that begin with ``notes``."""
    spec = {"library": "ours", "trainer": "hyscale", "accelerator": True, "options": {}, **spec}
    fits = []
    for index, fit in enumerate(spec.get("fits", [{}])):
        fit = {**spec, **fit, "fits": [], "runs": turns, "notes": f"{notes} {index}"}
        options = fit["options"]
        if options.get("drm") is False or not options.get("cpu_trainers", 1):
            fit["settle"] = 1  # static mapping
        if options.get("drm") is False:  # starts with the threads of a manager
            fit["options"] = {"threads": [1, 1, fit["torch_threads"]], **options}
        fits.append(fit)
    return {**spec, "fits": fits}


def take_turns(
    scripts: dict[str, Script | None], notes: dict[str, Path], index: int, runs: int,
    kinds: Sequence[str | None] = (None,),
) -> tuple[Rows, Notes]:  # fmt: skip
    """Measure a fit of all scripts, and return the rows and notes."""
    turns: dict[str, Callable[[], float] | None] = {}
    for name, script in scripts.items():
        for kind in kinds:
            label = name if kind is None else f"{name}, {kind}"
            turns[label] = None if script is None else partial(script, True if kind is None else kind)
    rows = measure(turns, runs)
    for script in scripts.values():
        if script is not None:
            script(True)  # the end of a fit would disturb the turns of other scripts
    for script in scripts.values():
        if script is not None:
            script.finish()
    files = {name: Path(f"{file} {index}") for name, file in notes.items()}
    return rows, {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def calibrate(common: dict[str, Any]) -> dict[str, Any]:
    """Train on the CPU alone, with the threads of a hybrid's CPU trainer; return the notes."""
    spec = {"trainer": "plain", "accelerator": False, "describe": True, "settle": 1}
    [(_, notes)] = compete({**common, "iterations": max(4, common["iterations"] // 2)}, {"CPU": spec}, 1)
    return notes["CPU"]


def accelerator(common: dict[str, Any], notes: dict[str, Any], speed: float) -> dict[str, Any]:
    """Return the settings of an accelerator with the given speed relative to the CPU trainer."""
    seconds = notes["stages"]["train_cpu"] / speed
    found: dict[str, Any] = {"speed": speed, "seconds_per_seed": seconds / sum(notes["seeds"])}
    if common["device"] == "cpu":
        found["link"] = transferred_bytes(workload_of(notes)) / (paper_link() * seconds)
    return found


def ablation(common: dict[str, Any], notes: dict[str, Any], runs: int, only: str = "", quick: bool = False) -> Found:
    """Measure all variants with each accelerator, and add the model's predictions."""
    speeds = common["speeds"]
    fits = [accelerator(common, notes, speed) for speed in speeds]
    chosen = {name: {**spec, "fits": fits} for name, spec in VARIANTS.items() if only in name}
    result: Found = {"rows": [], "comparisons": [], "figure_11": {}}
    for speed, fit, (rows, noted) in zip(speeds, fits, compete(common, chosen, runs), strict=True):
        label = f"{speed:g}x the CPU trainer"
        add_ratios(rows, ALONE, higher_is_better=False)
        result["figure_11"][label] = predictions(common, notes, fit, rows, noted)
        what = f"Hybrid training, accelerator {label}"
        alone = [PYG], [ALONE, ALONE_TFP], [STATIC], [OURS]
        for ours, peers_, text in (
            (FORCED, alone[0], "against PyG on it alone"),
            (OURS, alone[2], "what DRM gains"),
            (PUBLISHED, alone[2], "what DRM as published gains"),
            (FORCED, alone[3], "what the two-stage prefetch gains"),
            (FORCED, alone[1], "with a CPU trainer in any case"),
        ):
            compared = compare(rows, f"{what}, {text}", [ours], peers_, False, by_rounds=True)
            result["comparisons"].append(named(compared, label))
        result["rows"] += [named(row, label) for row in rows]
    return result


def admission(common: dict[str, Any], notes: dict[str, Any], runs: int, only: str = "", quick: bool = False) -> Found:
    """Compare the default options, which start a CPU trainer only where it pays, with the accelerator alone.

    Each accelerator has scripts of its own: processes that exist already would train on the CPU in the next fit, too.
    """
    result: Found = {"rows": [], "comparisons": [], "cpu_trainers": {}}
    for speed in common["speeds"]:
        label, fits = f"{speed:g}x the CPU trainer", [accelerator(common, notes, speed)]
        contestants = {ALONE_TFP: {**VARIANTS[ALONE_TFP], "fits": fits}, HYBRID: {"fits": fits}}
        [(rows, noted)] = compete(common, contestants, runs)
        what = f"Hybrid training, accelerator {label}, against the accelerator alone"
        compared = compare(rows, what, [HYBRID], [ALONE_TFP], False, 0.99, by_rounds=True)
        result["comparisons"].append(named(compared, label))
        result["rows"] += [named(row, label) for row in rows]
        result["cpu_trainers"][label] = len(noted[HYBRID]["shares"]) - 1
    return result


def named(row: dict[str, Any], label: str) -> dict[str, Any]:
    """Return a row or comparison with the settings added to the contestants' names."""
    return {key: f"{row[key]}, {label}" if key in ("name", "ours", "peer", "against") else row[key] for key in row}


def predictions(
    common: dict[str, Any], notes: dict[str, Any], fit: dict[str, Any], rows: Rows, noted: Notes
) -> dict[str, Any]:
    """Return, for each hybrid variant, its mapping and the model's error with both sets of speeds."""
    found = {}
    trainer = common["torch_threads"]
    for row in rows:
        name = row["name"]
        if "median" not in row or "options" not in VARIANTS[name] or not noted.get(name, {}).get("first_shares"):
            continue
        options, own = VARIANTS[name]["options"], noted[name]
        mapping = mapping_of(own, common)
        entry: dict[str, Any] = {"ms": row["median"], "mapping": str(mapping), **own}
        platforms = {"calibrated": with_accelerator(calibrated(notes), trainer, fit["speed"], fit.get("link", 1e30))}
        if "platform" in own:
            platforms["not calibrated"] = platform_of(own)
        for which, platform in platforms.items():
            workload = workload_of(own if "workload" in own and which != "calibrated" else notes)
            milliseconds = 1e3 * predicted(PerformanceModel(platform, workload), mapping, options.get("prefetch", 2))
            entry[f"predicted_ms, {which}"] = shortened(milliseconds)
            entry[f"error_percent, {which}"] = round(100 * (milliseconds / row["median"] - 1), 1)
        found[name] = entry
    return found


def mapping_of(own: dict[str, Any], common: dict[str, Any]) -> TaskMapping:
    """Return the mapping at the end of a fit."""
    cpu = len(own["shares"]) > 1
    seeds = own["seeds"] or [stop - start for start, stop in split_seeds(common["batch_size"], own["shares"])]
    return TaskMapping(tuple(seeds), int(cpu), (*own["threads"][:2], own["threads"][2] if cpu else 0))


def rates(common: dict[str, Any], notes: dict[str, Any], runs: int, only: str = "", quick: bool = False) -> Found:
    """Compare the hybrid with the sum of its trainers' rates, each alone on the cores that it has in the hybrid.

    Alone, each trains on its share of an iteration's seeds that balances both. The accelerator's rank has the first
    core, for sampling, loading and launching, and the CPU trainer has all others. ``free`` is a hybrid whose ranks may
    run on any core, as by default.
    """
    cores = sorted(range(num_cores()))
    own = [cores[:1], cores[1:] or cores]
    speeds = common["speeds"]
    fits = [accelerator(common, notes, speed) for speed in speeds]
    split = [round(common["batch_size"] / (1 + speed)) for speed in speeds]
    iterations = common["iterations"]
    there, here, pinned, free = "accelerator alone", "CPU trainer alone", "hybrid on the same cores", "hybrid, free"
    contestants: dict[str, dict[str, Any]] = {
        there: {"options": {"cpu_trainers": 0}, "cores": [own[0]], "fits": []},
        here: {"trainer": "plain", "accelerator": False, "cores": [own[1]], "fits": []},
        pinned: {"cores": own, "fits": fits, "options": {"cpu_trainers": 1}},
        free: {"fits": fits, "options": {"cpu_trainers": 1}},
    }
    for fit, seeds in zip(fits, split, strict=True):
        contestants[there]["fits"].append({**fit, "batch_size": common["batch_size"] - seeds})
        contestants[here]["fits"].append({"batch_size": seeds})
    result: Found = {"rows": [], "comparisons": [], "iterations": iterations}
    for speed, seeds, (rows, noted) in zip(speeds, split, compete(common, contestants, runs), strict=True):
        label = f"{speed:g}x the CPU trainer"
        values = {row["name"]: row["values"] for row in rows}
        together = [
            (common["batch_size"] - seeds) / a + seeds / c for a, c in zip(values[there], values[here], strict=True)
        ]
        what = f"The hybrid's rate over the sum of its trainers' alone, accelerator {label}"
        for name in (pinned, free):
            hybrid = [common["batch_size"] / value for value in values[name]]
            result["comparisons"].append(compare_with_sum(what, f"{name}, {label}", hybrid, together))
        result["rows"] += [named(row, f"rates, {label}") for row in rows]
        result[label] = {name: noted[name].get("seeds") for name in (pinned, free)}
    return result


def sleeping(common: dict[str, Any], notes: dict[str, Any], runs: int, only: str = "", quick: bool = False) -> Found:
    """Compare the hybrid of a CPU trainer and four weaker accelerators with the sum of their rates."""
    whole, (weak, strong) = common["batch_size"], SLEEPING_RATES
    own = [round(whole * rate / (strong + ACCELERATORS * weak)) for rate in (weak, strong)]
    contestants = {
        "accelerator alone": {"trainer": "plain", "sleeps": [1 / weak], "batch_size": own[0]},
        "CPU trainer alone": {"trainer": "plain", "sleeps": [1 / strong], "batch_size": own[1]},
        "hybrid": {
            "accelerators": ACCELERATORS,
            "sleeps": [1 / weak] * ACCELERATORS + [1 / strong],
            "options": {"cpu_trainers": 1},
        },
    }
    sizes = {"iterations": max(4, common["iterations"] // 4), "fanouts": [2, 2, 2], "device": "cpu"}
    [(rows, noted)] = compete({**common, **sizes}, contestants, runs)
    values = [row["values"] for row in rows]
    together = [ACCELERATORS * own[0] / a + own[1] / c for a, c in zip(*values[:2], strict=True)]
    what = "The hybrid's rate over the sum of its trainers' alone, four accelerators weaker than the CPU trainer"
    compared = compare_with_sum(what, "hybrid, sleeping", [whole / each for each in values[2]], together)
    rows = [named(row, "sleeping") for row in rows]
    return {"rows": rows, "comparisons": [compared], "decisions": noted["hybrid"].get("decisions")}


def compare_with_sum(what: str, name: str, hybrid: list[float], together: list[float]) -> dict[str, Any]:
    """Return the comparison of a hybrid's rates with the sums of its trainers' rates, round by round."""
    ratio = ratio_of_rounds(hybrid, together)
    return {
        "what": what,
        "target": 0.95,
        "unit": "seeds per ms",
        "ours": name,
        "peer": "sum of all trainers alone",
        "medians": [shortened(median(hybrid)), shortened(median(together))],
        "ratio": shortened(median(a / b for a, b in zip(hybrid, together, strict=True))),
        **({} if ratio is None else {"interval": [shortened(ratio.low), shortened(ratio.high)]}),
    }


def disturbances(
    common: dict[str, Any], notes: dict[str, Any], runs: int, only: str = "", quick: bool = False
) -> Found:
    """Block a core for the middle third of an epoch, or slow the accelerator down, with and without a manager."""
    fit = accelerator(common, notes, SPEEDS[1])
    sizes = {"iterations": common["iterations"] if quick else 6 * common["iterations"]}
    sizes["batch_size"] = max(2, common["batch_size"] // 2)  # the managers count iterations, not seconds
    ways: dict[str, dict[str, Any]] = {STATIC: {"drm": False}, PUBLISHED: {"drm": "paper"}, OURS: {}}
    contestants = {
        name: {"options": {"cpu_trainers": 1, **options}, "fits": [fit], "settle": 1} for name, options in ways.items()
    }
    kinds = ("calm", "core", "accelerator")
    [(rows, noted)] = compete({**common, **sizes}, contestants, max(2, runs - 2), kinds)
    values = {row["name"]: row["values"] for row in rows if "values" in row}
    lost: dict[str, Any] = {}
    comparisons = []
    for kind in kinds[1:]:
        for name in ways:
            if f"{name}, calm" not in values:
                continue
            rounds = zip(values[f"{name}, {kind}"], values[f"{name}, calm"], strict=True)
            more = [(disturbed - calm, disturbed / calm - 1) for disturbed, calm in rounds]
            lost.setdefault(kind, {})[name] = {
                "ms of an iteration": shortened(median(seconds for seconds, _ in more)),
                "part": shortened(median(part for _, part in more)),
            }
        for name in (OURS, PUBLISHED):
            what = f"Training while disturbed ({kind}), {name.removeprefix('ours, + ')} against a static mapping"
            comparisons.append(compare(rows, what, [f"{name}, {kind}"], [f"{STATIC}, {kind}"], False, by_rounds=True))
    decisions = {name: own.get("decisions") for name, own in noted.items()}
    shown = [named(row, "disturbed") for row in rows]
    return {"rows": shown, "comparisons": comparisons, "time lost": lost, "decisions": decisions}


def sweep(common: dict[str, Any], notes: dict[str, Any], runs: int, only: str = "", quick: bool = False) -> Found:
    """Try manual shares of the CPU trainer without a manager, and the automatic share with and without one."""
    fit = accelerator(common, notes, SPEEDS[1])
    automatic, managed = "cpu_share='auto'", "cpu_share='auto', + DRM"
    shares = SHARES[2:5] if quick else SHARES
    contestants: dict[str, dict[str, Any]] = {
        f"cpu_share={share}": {"options": {"drm": False, "cpu_share": share}, "fits": [fit]} for share in shares
    }
    by_hand = list(contestants)
    contestants |= {automatic: {"options": {"drm": False}, "fits": [fit]}, managed: {"options": {}, "fits": [fit]}}
    [(rows, noted)] = compete(common, contestants, runs)
    what = "cpu_share found automatically against the best by hand"
    comparisons = [
        compare(rows, what, [automatic], by_hand, False, 0.97, by_rounds=True),
        compare(rows, f"{what}, with the manager", [managed], by_hand, False, 0.97, by_rounds=True),
    ]
    medians = {row["name"]: row["median"] for row in rows}
    picked = {name: shortened(noted[name]["shares"][0]) for name in contestants if name in noted}
    return {"rows": rows, "comparisons": comparisons, "picked": picked, "medians": medians}


def lone(common: dict[str, Any], notes: dict[str, Any], runs: int, only: str = "", quick: bool = False) -> Found:
    """Compare a single trainer with the strategy with the plain Trainer, for long and short steps."""
    batch, iterations = common["batch_size"], common["iterations"]
    lengths = {
        "long steps": {"batch_size": max(1, batch // 4), "iterations": 2 * iterations},
        "short steps": {"batch_size": max(1, batch // 128), "iterations": 16 * iterations},
    }
    result: Found = {"rows": [], "comparisons": []}
    for length, sizes in lengths.items():
        plain, ours = f"plain Trainer, {length}", f"ours, lone trainer, {length}"
        spec = {"accelerator": False, "settle": 1}
        contestants = {plain: {**spec, "trainer": "plain"}, ours: spec}
        [(rows, _)] = compete({**common, **sizes}, contestants, runs + MORE_RUNS)
        what = f"A lone trainer under the strategy, {length}"
        result["comparisons"].append(compare(rows, what, [ours], [plain], False, 0.99, by_rounds=True))
        result["rows"] += rows
    return result


class OneScript:
    """A GPU alone, with CPU trainers as the default options decide, and with one in any case, managed: in one script.

    The script has a second rank only from the fit on that starts a CPU trainer, so fits run one after the other. It
    starts at once, without waiting, and trains once it is measured. A CPU in place of the GPU is simulated.
    """

    LIMIT = 150.0
    """Seconds after which a script that says nothing has failed."""
    ALONE, RULE, MANAGED = "GPU only", "default options", "a CPU trainer, managed"
    FITS: ClassVar[dict[str, dict[str, Any]]] = {
        "GPU only, plain Trainer": {"trainer": "plain", "settle": 1},
        ALONE: {"options": {"cpu_trainers": 0}},
        RULE: {},
        MANAGED: {"options": {"cpu_trainers": 1}},
    }

    def __init__(self, device: torch.device, runs: int, is_small: bool) -> None:
        self.runs, self.sizes = runs, {name: sizes[is_small] for name, sizes in SIZES.items()}
        self.common = common_settings(self.sizes, device.type) | {"num_workers": max(2, num_cores() // 4)}
        paced = {"speed": None} if device.type == "cuda" else {"speed": 4.0, "seconds_per_seed": 1e-5, "link": 1e9}
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        fits = [{**paced, **fit} for fit in self.FITS.values()]
        spec = completed({**self.common, "fits": fits}, runs + 1, folder / "notes")
        self._notes, self._script = {"": folder / "notes"}, Script(MODULE, spec, folder, "script", is_ahead=True)
        self._script.limit = self.LIMIT

    def measure(self) -> dict[str, Any]:
        """Return rows, comparisons, the rule's decision and the iterations that the model predicts."""
        rows: Rows = []
        notes: Notes = {}
        for index, name in enumerate(self.FITS):
            [row], noted = take_turns({"": self._script}, self._notes, index, self.runs)
            rows.append({**row, "name": name})
            notes[name] = noted.get("", {})
        what = f"Hybrid training on a GPU with {num_cores()} cores, {{}}, against the GPU alone"
        named = self.RULE, self.MANAGED
        return {
            "title": f"Hybrid training, GraphSAGE, {self.sizes['batch_size']} seeds an iteration, on a GPU",
            "unit": "ms per iteration", "settings": {**self.sizes, "fanouts": list(FANOUTS), "runs": self.runs},
            "rows": rows,
            "comparisons": [compare(rows, what.format(name), [name], [self.ALONE], False) for name in named],
            "rule": {"says": notes[self.RULE].get("admission"), **self._rule(notes[self.RULE])},
            "variants": {name: self._predict(own, notes[self.RULE]) for name, own in notes.items()},
        }  # fmt: skip

    def _rule(self, ruled: dict[str, Any]) -> dict[str, float]:
        """Return the ms of an iteration that the rule's figures predict with a CPU trainer and without."""
        if "platform" not in ruled or "workload" not in ruled:
            return {}
        model = PerformanceModel(platform_of(ruled), workload_of(ruled))
        mappings = {"with the CPU": model.best_mapping(1), "without": model.best_mapping(0)}
        return {name: shortened(1e3 * model.iteration_time(mapping)) for name, mapping in mappings.items()}

    def _predict(self, own: dict[str, Any], ruled: dict[str, Any]) -> dict[str, Any]:
        """Return the shares, decisions and stages of a fit, and the model's ms of an iteration with its mapping."""
        kept = {name: own[name] for name in ("shares", "threads", "stages", "decisions") if name in own}
        known = own if "platform" in own else ruled
        if not own.get("shares") or "platform" not in known or "workload" not in known:
            return kept
        model, mapping = PerformanceModel(platform_of(known), workload_of(known)), mapping_of(own, self.sizes)
        return {**kept, "mapping": str(mapping), "predicted_ms": shortened(1e3 * predicted(model, mapping, 2))}

    def close(self) -> None:
        """End the script."""
        self._script.close()
        self._folder.cleanup()


PARTS: dict[str, Callable[..., Found]] = {
    "admission": admission,
    "ablation": ablation,
    "sum": rates,
    "sleeping": sleeping,
    "disturbance": disturbances,
    "sweep": sweep,
    "lone": lone,
}


OPTIONS = {
    "parts": f"some of {','.join(PARTS)} (default: all)",
    "speeds": f"of the accelerators in ablation and sum (default: {','.join(map(str, SPEEDS))}, quick: {SPEEDS[0]})",
}


def common_settings(sizes: dict[str, int], device: str) -> dict[str, Any]:
    """Return the settings of all contestants."""
    return {
        **sizes, "device": device, "fanouts": list(FANOUTS), "torch_threads": max(1, num_cores() - 2), "num_workers": 2,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("hyscale", __doc__ or "", SIZES, argv, paths=OPTIONS)
    chosen = args.parts.split(",") if args.parts else list(PARTS)
    unknown = set(chosen) - set(PARTS)
    if unknown:
        raise SystemExit(f"unknown --parts {', '.join(sorted(unknown))}; use some of {', '.join(PARTS)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    described = machine()
    speeds = [float(speed) for speed in args.speeds.split(",")] if args.speeds else SPEEDS[: 1 if args.quick else 3]
    common = {**common_settings(args.sizes, device), "speeds": speeds}
    before = json.loads(args.out.read_text()) if args.parts and args.out is not None and args.out.exists() else {}
    parts: dict[str, Found] = dict(before.get("parts", {}))
    notes = calibrate(common)
    for part in chosen:
        parts[part] = {"machine": described, **PARTS[part](common, notes, args.runs, args.only, args.quick)}
    parts = {part: parts[part] for part in PARTS if part in parts}
    result = {
        "benchmark": "hyscale",
        "title": f"Hybrid training, GraphSAGE, {args.batch_size} seeds an iteration, "
        + ("the accelerator a GPU" if device == "cuda" else "the accelerator simulated"),
        "unit": "ms per iteration",
        "settings": {**args.sizes, "fanouts": list(FANOUTS), "runs": args.runs},
        "machine": described,
        "rows": [row for found in parts.values() for row in found["rows"]],
        "comparisons": [comparison for found in parts.values() for comparison in found["comparisons"]],
        "extra": summary(parts),
        "measured_alone": notes["stages"],
        "parts": parts,
    }
    return publish(result, args.out)


def summary(parts: dict[str, Found]) -> dict[str, Any]:
    """Return the figures to print in addition to rows and comparisons."""
    figures: dict[str, Any] = {}
    for label, variants in parts.get("ablation", {}).get("figure_11", {}).items():
        figures[f"errors of the prediction in percent (calibrated, not), accelerator {label}"] = {
            name: [entry.get(f"error_percent, {which}") for which in ("calibrated", "not calibrated")]
            for name, entry in variants.items()
        }
    for part, key in (("disturbance", "time lost"), ("sweep", "picked")):
        if part in parts:
            figures[f"{part}: {key}"] = parts[part][key]
    return figures


if __name__ == "__main__":
    main()

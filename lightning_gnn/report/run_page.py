"""report.html of one run: what came out, how, where the time went, and how to repeat it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from lightning_gnn.report.html import Html, file_of, joined, page, section, table, tag
from lightning_gnn.report.metrics import BOUNDED, NAMES, STAGES, split_rows, tested
from lightning_gnn.report.runs import Run, read_curves, read_run, shown_score, shown_seconds
from lightning_gnn.report.svg import bars, line_chart
from lightning_gnn.runtime.files import write_whole

WAITING = (
    "Waiting: seconds for which the training thread has asked for a mini-batch and not got it yet. With num_workers=0 "
    "it prepares the mini-batch itself then."
)
_UNKNOWN: dict[str, float | None] = dict.fromkeys(("sampling_s", "features_s", "model_s", "wait_s", "other_s"))
_TRAINING = (("model", "model_s", 0), ("waiting", "wait_s", 3), ("other", "other_s", 5))
"""Parts of the training thread's time: what to call them, where they are, and the number of their colour."""


def write_run_page(folder: str | Path) -> Path:
    """Make ``report.html`` of what lies in the folder of a run; whatever is missing there is left out."""
    run = read_run(folder)
    return write_whole(run.folder / "report.html", run_page(run))


def run_page(run: Run) -> str:
    """Return the page of a run."""
    metrics = run.metrics
    title = str(metrics.get("title") or " ".join(["lgnn", *["plan"] * (run.state == "plan"), *run.overrides]))
    took = shown_seconds(run.seconds)
    line = " · ".join(filter(None, [f"{run.started:%Y-%m-%d %H:%M}", run.state, took, str(run.folder.absolute())]))
    return page(
        title,
        tag("h1", title),
        tag("p", line, class_="dim"),
        tag("p", metrics["error"], class_="bad") if metrics.get("error") else None,
        section("Scores", _scores(metrics)),
        section("Curves", _curves(run)),
        section("Where the time went", _time(metrics)),
        section("Plan", *_plan(run)),
        section("Repeat it", tag("pre", f"cd {shlex.quote(run.cwd)}\n{run.command}" if run.cwd else run.command)),
        section("Configuration", file_of(run.folder / ".hydra/config.yaml")),
        section("Environment", _pairs(metrics.get("environment"))),
    )


def _scores(metrics: dict[str, Any]) -> Html | None:
    rows = []
    for name, value in metrics.items():
        stage, _, kind = name.partition("_")
        if stage in STAGES and isinstance(value, (int, float)):
            rows.append(
                (f"{STAGES[stage]} {NAMES.get(kind, kind)}", shown_score(name, value), f"of the {tested(metrics)}")
            )
    for name, key in (("Epochs", "epochs"), ("Parameters", "num_parameters")):
        if isinstance(metrics.get(key), int) and rows:
            rows.append((name, f"{metrics[key]:,}", ""))
    return table(rows, numbers=[1]) if rows else None


def _curves(run: Run) -> Html | None:
    epochs = read_curves(run.folder)
    if not epochs:
        return None

    def points(name: str) -> list[tuple[float, float]]:
        return [(row["epoch"] + 1, row[name]) for row in epochs if name in row and "epoch" in row]

    charts = [line_chart("Loss", {"training": points("train_loss_epoch"), "validation": points("val_loss")})]
    kinds = [name.removeprefix("val_") for row in epochs[-1:] for name in row if name.startswith("val_")]
    for kind in kinds:
        if kind == "loss":
            continue
        score = run.metrics.get(f"test_{kind}")
        rules = {f"test, {tested(run.metrics)}": score} if isinstance(score, (int, float)) else {}
        series = {"training": points(f"train_{kind}"), "validation": points(f"val_{kind}")}
        name = NAMES.get(kind, kind)
        whole = (0.0, 1.0) if kind in BOUNDED else None
        charts.append(line_chart(name[:1].upper() + name[1:], series, rules, whole, percent=kind == "acc"))
    drawn = [chart for chart in charts if chart is not None]
    return tag("div", *drawn, class_="row") if drawn else None


def _time(metrics: dict[str, Any]) -> Html | None:
    epoch, split = metrics.get("epoch_time_s"), metrics.get("time_split")
    if not isinstance(epoch, (int, float)) or not isinstance(split, dict) or not epoch:
        return None
    known = {name: float(value) for name, value in split.items() if isinstance(value, (int, float))}
    rows = {"training thread": [(name, known.get(key, 0.0), color) for name, key, color in _TRAINING]}
    if "sampling_s" in known:
        parts = [(name, known.get(f"{name}_s", 0.0), color) for name, color in (("sampling", 2), ("features", 1))]
        rows["preparation"] = parts
    rates = [("Epoch time", shown_seconds(epoch), "training only, median")]
    for name, key, unit in (("Sampled edges/s", "sampled_edges_per_s", 1e6), ("MTEPS", "mteps", 1.0)):
        if isinstance(value := metrics.get(key), (int, float)):
            what = "per sampling thread" if key == "sampled_edges_per_s" else "million edges trained on per second"
            rates.append((name, f"{value / unit:.3g}" + " M" * (unit > 1), what))
    shown = table([*rates, *split_rows({**_UNKNOWN, **known}, epoch)], numbers=[1])
    advice = tag("p", metrics["advice"]) if metrics.get("advice") else None
    return joined([bars("One epoch", rows), shown, advice, tag("p", WAITING, class_="dim")])


def _plan(run: Run) -> list[Html | None]:
    plan = run.metrics.get("plan")
    parts: list[Html | None] = []
    if isinstance(plan, dict):
        parts.append(tag("pre", plan.get("text", "")))
        predicted, measured = plan.get("epoch_s"), run.metrics.get("epoch_time_s")
        if isinstance(predicted, (int, float)) and isinstance(measured, (int, float)) and measured:
            rows = [("predicted epoch", f"{predicted:.3g} s"), ("measured epoch", f"{measured:.3g} s")]
            parts.append(table([*rows, ("predicted / measured", f"{predicted / measured:.2f}")], numbers=[1]))
    return [*parts, file_of(run.folder / "plan.yaml")]


def _pairs(values: Any) -> Html | None:
    return table(values.items()) if isinstance(values, dict) and values else None

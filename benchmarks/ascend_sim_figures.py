"""Plots of the paper's figures, in simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ascend_sim_engine import UNITS
from benchmarks.ascend_sim_order import ORDERS
from benchmarks.ascend_sim_summary import PAPER


def draw(data: dict[str, Any], path: Path) -> None:
    """Plot figures 4, 5, 10, 12 and 13, a column per chip; of figure 10 there is a row for each order of the vertices.

    Args:
        data: The figures' data.
        path: The PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    archs, leaning = list(data["epochs"]), ORDERS[1]
    figure, axes = pyplot.subplots(
        7, len(archs), figsize=(7 * len(archs), 22), squeeze=False, layout="constrained"
    )  # fmt: skip
    for column, arch in enumerate(archs):
        loads, sets = data["figure 4"][arch][leaning], data["epochs"][arch]
        _loads(axes[0, column], loads, f"Figure 4, {arch}: {data['shown']}, edges of each core, {leaning}")
        _timeline(axes[1, column], data["figure 5"][arch]["baseline"], f"Figure 5, {arch}: one core, baseline")
        _timeline(axes[2, column], data["figure 5"][arch]["+IP"], f"Figure 5, {arch}: one core, all steps")
        _gains(axes[3, column], sets[leaning], f"Figure 10, {arch}: gain of each step, {leaning} order")
        _gains(axes[4, column], sets[ORDERS[0]], f"Figure 10, {arch}: gain of each step, published order")
        _cores(axes[5, column], data["figure 12"][arch], f"Figure 12, {arch}: epoch against cores")
        _utilisation(axes[6, column], sets[leaning], f"Figure 13, {arch}: utilisation")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _loads(axis: Any, parts: dict[str, Any], title: str) -> None:
    for step, colour in (("baseline", "tab:orange"), ("+HP", "tab:blue")):
        load = np.array(parts[step]["load"]) / 1e3
        axis.step(range(load.size), load, where="mid", color=colour,
                  label=f"{step}: max/min {parts[step]['load, max/min']:.2f}")  # fmt: skip
    idle = axis.twinx()
    idle.bar(range(len(parts["baseline"]["idle"])), parts["baseline"]["idle"], color="tab:orange", alpha=0.25)
    idle.set(ylim=(0, 1), ylabel="idle share, baseline")
    axis.set(title=title, xlabel="core", ylabel="thousand edges", ylim=(0, None))
    axis.legend(loc="lower left", fontsize=8)


def _timeline(axis: Any, part: dict[str, Any], title: str) -> None:
    log = np.array(part["log"]).reshape(-1, 4)
    rows = sorted({(int(core), int(pipe)) for core, pipe in log[:, :2]})
    names = []
    for row, (core, pipe) in enumerate(rows):
        mine = log[(log[:, 0] == core) & (log[:, 1] == pipe)]
        spans = [(start, max(stop - start, 1)) for start, stop in mine[:, 2:]]
        axis.broken_barh(spans, (row - 0.4, 0.8), facecolors=f"C{pipe}")
        names.append(f"{UNITS[pipe]} {core}" if len({c for c, _ in rows}) > 1 else UNITS[pipe])
    axis.set(title=title, xlabel="cycles", yticks=range(len(rows)), yticklabels=names)


def _gains(axis: Any, sets: dict[str, Any], title: str) -> None:
    steps = (("baseline", "+HP", "the baseline"), ("+HP", "+CT", "+HP"), ("+CT", "+IP", "+CT"))
    for number, (before, step, called) in enumerate(steps):
        heights = [figures[before]["ms"] / figures[step]["ms"] for figures in sets.values()]
        places = np.arange(len(heights)) + number * 0.27
        axis.bar(places, heights, 0.25, color=f"C{number}", label=f"{step} (band: paper)")
        axis.axhspan(*PAPER[f"10, {step} over {called}"], color=f"C{number}", alpha=0.12)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(title=title, xticks=np.arange(len(sets)) + 0.27, xticklabels=list(sets), ylabel="times as fast")
    axis.legend(fontsize=8)


def _cores(axis: Any, sets: dict[str, Any], title: str) -> None:
    for number, (name, cores) in enumerate(sets.items()):
        counts = [int(count) for count in cores]
        for step, style in (("baseline", "--o"), ("+IP", "-o")):
            times = [figures[step] for figures in cores.values()]
            axis.plot(counts, times, style, color=f"C{number}", label=f"{name}, {step}")
    axis.set(title=title, xlabel="cores", ylabel="ms, simulated", ylim=(0, None))
    axis.legend(fontsize=8)


def _utilisation(axis: Any, sets: dict[str, Any], title: str) -> None:
    places = np.arange(len(sets))
    for number, (key, label) in enumerate((("cube busy", "cube multiplies"), ("utilisation", "a task runs (msprof)"))):
        for offset, step in enumerate(("baseline", "+IP")):
            heights = [figures[step][key] for figures in sets.values()]
            axis.bar(places + 0.2 * (2 * number + offset), heights, 0.18, color=f"C{number}",
                     alpha=0.5 + 0.5 * offset, label=f"{label}, {step}")  # fmt: skip
    for step in ("of the baseline", "with all steps"):
        axis.axhline(PAPER[f"13, utilisation {step}"][0], color="black", linestyle=":", label=f"paper, {step}")
    axis.set(title=title, xticks=places + 0.3, xticklabels=list(sets), ylabel="share of the time", ylim=(0, 1))
    axis.legend(fontsize=8)

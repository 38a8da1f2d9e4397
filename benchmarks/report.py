"""Turn the JSON files of the benchmarks into tables and a chart: ``python -m benchmarks.report``.

Writes all comparisons into docs/results.md, folded by topic below the chart, a selection into README.md, and costs by
size into docs/scaling.md. Only the text between two markers is replaced.
"""

from __future__ import annotations

import argparse
import json
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import MISSING, RESULTS, TABLE_HEAD, as_row, replaced

ROOT = Path(__file__).parent.parent
README, PAGE, SCALING = ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "scaling.md"
CHART, SCALING_CHART = ROOT / "docs" / "images" / "results.svg", ROOT / "docs" / "images" / "scaling.svg"
GAINS_CHART = ROOT / "docs" / "images" / "hyscale-gains.svg"
CHARTS = ROOT / "docs" / "charts.py"
GPU_START, GPU_END = "<!-- gpu:start -->", "<!-- gpu:end -->"
TOPICS = {
    "Sampling, CPU": ("sampling", "typed_sampling"),
    "Mini-batches, CPU": ("minibatch",),
    "Features on disk, CPU": ("disk",),
    "Training, CPU": ("epoch", "sums_ahead", "typed_epoch", "time_to_accuracy", "labor"),
    "Aggregation, CPU": ("aggregate", "aggregate_update"),
    "Full graphs, CPU": ("full_graph",),
    "Collective batching, simulated": ("collective",),
    "Hybrid training, simulated": ("hyscale",),
    "On a GPU": ("gpu_minibatch", "gpu_epoch", "gpu_persistent", "gpu_collective", "gpu_aggregate", "gpu_hyscale",
                 "gpu_full_graph"),
}  # fmt: skip
"""The files of each topic, without ``.json``; missing files are skipped."""
KINDS = {"peers": "Against peers", "limits": "Against limits", "ours": "Ours against ours"}
_PEERS = ("PyG", "pyg-lib", "GraphBolt", "torch", "plain Trainer")
_LIMITS = ("sum of both alone", "cpu_share=", "bound")
HEADLINES = (
    "Training epoch, SAGE, against PyG with trim_to_layer",
    "Training epoch, SAGE, against GraphBolt",
    "Training epoch, SAGE, bf16-mixed, against GraphBolt in bf16-mixed",
    "Training epoch, SAGE, bf16-mixed, against float32",
    "Training epoch, R-GCN, against PyG",
    "Time to accuracy, 22k nodes, against PyG's loader",
    "Full-graph epoch, GAT on Reddit, against PyG, edge_index",
    "Full-graph epoch, GCN on Products, on a GPU, against PyG, sparse",
    "Mini-batches, two cores, against GraphBolt",
    "Sampling, one core, against pyg-lib",
    "Sampling, one core, against GraphBolt, per mini-batch",
    "Hybrid training, accelerator 2x the CPU trainer, against the accelerator alone",
    "Hybrid training, accelerator 4x the CPU trainer, against the accelerator alone",
)
"""Comparisons for the README, including unfavorable ones; epochs and fits come first."""


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Read the existing results in the order of the topics, each with its topic and its limits as comparisons."""
    found = []
    for topic, names in TOPICS.items():
        for file in (folder / f"{name}.json" for name in names):
            if file.exists():
                result = json.loads(file.read_text())
                result["comparisons"] += _limits(result)
                found.append({"topic": topic, **result})
    return found


def _limits(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield comparisons with the lower bound from the machine's bandwidth and product rate."""
    for name, found in result.get("roofline", {}).items():
        ours = next(row for row in result["rows"] if row["name"].startswith(f"ours, {name}"))
        bound = found["bound s"] if "bound s" in found else found["bound ms"]
        yield {"what": f"{result['benchmark'].replace('_', '-').capitalize()}, {name}, against the machine's bound",
               "ours": ours["name"], "peer": "bound", "medians": [ours["median"], bound],
               "ratio": bound / ours["median"]}  # fmt: skip


def kind(comparison: dict[str, Any]) -> str:
    """Return the key in ``KINDS`` that a comparison belongs to."""
    peer = comparison.get("peer", "PyG")
    return "peers" if peer.startswith(_PEERS) else "limits" if peer.startswith(_LIMITS) else "ours"


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown of all comparisons, folded by topic: medians, their ratio, and the machine.

    A ratio is followed by its 95 % confidence interval, if the result has one.
    """
    parts = []
    for topic in dict.fromkeys(result["topic"] for result in results):
        chosen = [result for result in results if result["topic"] == topic]
        rows: dict[str, list[str]] = {name: [] for name in KINDS}
        for result in chosen:
            for comparison in result["comparisons"]:
                rows[kind(comparison)].append(as_row(result, comparison))
        counts = ", ".join(f"{len(rows[name])} {title.lower()}" for name, title in KINDS.items() if rows[name])
        parts += ['<details markdown="1">', f"<summary><b>{topic}</b>: {counts}</summary>", ""]
        for name, title in KINDS.items():
            if rows[name]:
                parts += [f"**{title}**", "", *TABLE_HEAD, *rows[name], ""]
        parts += [*(f"- {result['title']}: {_machine(result)}" for result in chosen), "", "</details>", ""]
    return "\n".join(parts[:-1])


def chart(results: Sequence[dict[str, Any]]) -> str:
    """Return the SVG with all ratios and their intervals, a row per topic and a column per kind."""
    rows: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for result in results:
        cells = rows.setdefault(result["topic"], {title: [] for title in KINDS.values()})
        for comparison in result["comparisons"]:
            if "ratio" in comparison:
                interval = comparison.get("interval", [comparison["ratio"]] * 2)
                cells[KINDS[kind(comparison)]].append((comparison["ratio"], *interval))
    draw = runpy.run_path(str(CHARTS))["ratios"]
    return str(draw("Ratios of all comparisons; above 1, ours is faster", rows))


def scaling(folder: Path = RESULTS) -> tuple[str, str]:
    """Return the tables and the figure of docs/scaling.md."""
    from benchmarks.scaling import BILLION, table_of_steps, tables

    found = json.loads((folder / "scaling.json").read_text())
    steps = table_of_steps(json.loads((folder / BILLION.name).read_text()))
    chart = runpy.run_path(str(CHARTS))["growth"]("How cost grows", found["extra"]["fits"])
    return f"{tables(found)}\n\n{steps}", str(chart)


def hybrid_gains(folder: Path = RESULTS) -> str:
    """Return the figure of docs/guides/hyscale.md: hybrid training over the accelerator alone, by its speed."""
    from benchmarks.hyscale.epochs import ALONE_TFP, FORCED
    from benchmarks.hyscale.model import platform_of, workload_of
    from lightning_gnn.hyscale.analytic import PerformanceModel

    found = json.loads((folder / "hyscale.json").read_text())
    names = "predicted, with a CPU trainer", "measured, with a CPU trainer", "measured, default options"
    lines: dict[str, dict[float, float]] = {name: {} for name in names}
    compared = {comparison["what"]: comparison.get("ratio") for comparison in found["comparisons"]}
    for label, variants in found["parts"]["ablation"]["figure_11"].items():
        speed, own = float(label.partition("x")[0]), variants[FORCED]
        model = PerformanceModel(platform_of(own), workload_of(own))
        alone, both = (model.iteration_time(model.best_mapping(number)) for number in (0, 1))
        default = compared[f"Hybrid training, accelerator {label}, against the accelerator alone"]
        ratios = alone / both, variants[ALONE_TFP]["ms"] / own["ms"], default
        for name, ratio in zip(names, ratios, strict=True):
            lines[name][speed] = ratio
    draw = runpy.run_path(str(CHARTS))["gains"]
    return str(
        draw("Hybrid training against the accelerator alone", "speed of the accelerator, in CPU trainers", lines)
    )


def headlines(results: Sequence[dict[str, Any]], chosen: Sequence[str] = HEADLINES) -> str:
    """Return the lines of :func:`table` that the README shows, and the machines they were measured on."""
    found = {comparison["what"]: (result, comparison) for result in results for comparison in result["comparisons"]}
    if missing := [what for what in chosen if what not in found]:
        raise KeyError(f"no result has {missing[0]!r}; choose other HEADLINES")
    lines = [as_row(*found[what]) for what in chosen]
    machines = dict.fromkeys(_machine(found[what][0]) for what in chosen)
    return "\n".join([*TABLE_HEAD, *lines, "", *(f"- {machine[0].upper()}{machine[1:]}" for machine in machines)])


def _machine(result: dict[str, Any]) -> str:
    """Describe the machine and the versions in one line."""
    machine, runs = result["machine"], result["settings"]["runs"]
    versions = {
        "Python": machine["python"],
        "torch": machine["torch"],
        "PyG": machine["torch_geometric"],
        "pyg-lib": machine["pyg_lib"],
        "torch-sparse": machine["torch_sparse"],
        "DGL": machine.get("dgl", MISSING),
    }
    known = ", ".join(f"{name} {value}" for name, value in versions.items() if value != MISSING)
    gpu = f"{machine['gpu']}, " if "gpu" in machine else ""
    return f"medians of {runs} runs on {gpu}{machine['cores']} cores of {machine['cpu']}, {machine['os']}; {known}."


GPU_FILES = ("first", "persistent", "aggregate_blocks", "full_graph", "collective", "hyscale")


def gpu(folder: Path = RESULTS) -> str:
    """Return what the files of ``make bench-gpu`` say."""
    from benchmarks.gpu.page import quoted

    files = {name: folder / f"gpu_{name}.json" for name in GPU_FILES}
    found = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    return quoted(found.pop("first"), found)


def pages(results: Sequence[dict[str, Any]]) -> dict[Path, str]:
    """Return the pages with results, complete with what the files say."""
    page = replaced(PAGE.read_text(encoding="utf-8"), table(results))
    readme = replaced(README.read_text(encoding="utf-8"), headlines(results))
    grows = replaced(SCALING.read_text(encoding="utf-8"), scaling()[0])
    return {PAGE: replaced(page, gpu(), GPU_START, GPU_END), README: readme, SCALING: grows}


def main(argv: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser("python -m benchmarks.report", description=__doc__)
    parser.add_argument("--print", action="store_true", help="print the complete table without changing files")
    args = parser.parse_args(argv)
    results = load()
    content = table(results)
    if args.print:
        print(content)
        return content
    for path, text in pages(results).items():
        path.write_text(text, encoding="utf-8")
    CHART.write_text(chart(results), encoding="utf-8")
    SCALING_CHART.write_text(scaling()[1], encoding="utf-8")
    GAINS_CHART.write_text(hybrid_gains(), encoding="utf-8")
    return content


if __name__ == "__main__":
    main()

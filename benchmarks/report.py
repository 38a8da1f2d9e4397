"""Turn the JSON files of the benchmarks into tables: ``python -m benchmarks.report``.

All comparisons stand in docs/results.md, those that tell most in README.md: between two markers, outside of which
everything stays as it is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import MISSING, RESULTS

ROOT = Path(__file__).parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
ORDER = (
    *(
        "sampling",
        "typed_sampling",
        "labor",
        "minibatch",
        "epoch",
        "time_to_accuracy",
        "collective",
        "aggregate",
        "aggregate_update",
        "hyscale",
        "full_graph",
    ),
    *("gpu_minibatch", "gpu_epoch", "gpu_persistent", "gpu_collective", "gpu_aggregate", "gpu_hyscale"),
    "gpu_full_graph",
)
HEADLINES = (
    "Sampling, one core, against pyg-lib",
    "Typed sampling, graph like OGB-MAG, against pyg-lib, one core",
    "Temporal sampling, against pyg-lib, one core",
    "Weighted sampling, against pyg-lib, one core",
    "Mini-batches, 2 workers each, against PyG's NeighborLoader",
    "Training epoch, SAGE, against the same with trim_to_layer",
    "Training epoch, GAT, against the same with trim_to_layer",
    "Full-graph epoch, GCN on Reddit, against PyG, sparse",
    "Full-graph epoch, GAT on Reddit, against PyG, edge_index",
    "Hybrid training, accelerator 4x the CPU trainer, against it alone",
)
"""The comparisons that the README shows: ten, and not all of them flattering."""
_HEAD = ["| measured | ours | peer | ratio |", "|---|---|---|---|"]


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Read the results there are, in the order of the table."""
    files = [folder / f"{name}.json" for name in ORDER]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table: one line per comparison, medians with their ratio, and what they were measured on.

    Behind a ratio stands its 95 % confidence interval, if the result has one.
    """
    lines = [_line(result, comparison) for result in results for comparison in result["comparisons"]]
    notes = [f"- {result['title']}: {_machine(result)}" for result in results]
    return "\n".join([*_HEAD, *lines, "", *notes])


def headlines(results: Sequence[dict[str, Any]], chosen: Sequence[str] = HEADLINES) -> str:
    """Return the lines of :func:`table` that the README shows, and the machines they were measured on."""
    found = {comparison["what"]: (result, comparison) for result in results for comparison in result["comparisons"]}
    if missing := [what for what in chosen if what not in found]:
        raise KeyError(f"no result has {missing[0]!r}; choose other HEADLINES")
    lines = [_line(*found[what]) for what in chosen]
    machines = dict.fromkeys(_machine(found[what][0]) for what in chosen)
    return "\n".join([*_HEAD, *lines, "", *(f"- {machine[0].upper()}{machine[1:]}" for machine in machines)])


def _line(result: dict[str, Any], comparison: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "missing" in comparison:
        return f"| {comparison['what']} | | {comparison['missing']} | |"
    ours, peer = (
        f"{float(f'{median:.3g}'):,g} {result['unit']} ({comparison[side]})"  # three digits, none as a power of ten
        for side, median in zip(("ours", "peer"), comparison["medians"], strict=True)
    )
    sure = " ({:.3g} to {:.3g})".format(*comparison["interval"]) if "interval" in comparison else ""
    return f"| {comparison['what']} | {ours} | {peer} | **{comparison['ratio']:.2g}x**{sure} |"


def _machine(result: dict[str, Any]) -> str:
    """Describe the machine and the versions in one line."""
    machine, runs = result["machine"], result["settings"]["runs"]
    versions = {
        "Python": machine["python"],
        "torch": machine["torch"],
        "PyG": machine["torch_geometric"],
        "pyg-lib": machine["pyg_lib"],
        "torch-sparse": machine["torch_sparse"],
    }
    known = ", ".join(f"{name} {value}" for name, value in versions.items() if value != MISSING)
    gpu = f"{machine['gpu']}, " if "gpu" in machine else ""
    return f"medians of {runs} runs on {gpu}{machine['cores']} cores of {machine['cpu']}, {machine['os']}; {known}."


def replaced(text: str, content: str) -> str:
    """Return ``text`` with ``content`` between the markers."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"there is no {START} … {END}; put both lines where the table belongs")
    return f"{before}{START}\n{content}\n{END}{after}"


def pages(results: Sequence[dict[str, Any]]) -> dict[Path, str]:
    """Return the files that show results, with what stands between their markers."""
    return {PAGE: table(results), README: headlines(results)}


def main(argv: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser("python -m benchmarks.report", description=__doc__)
    parser.add_argument("--print", action="store_true", help="print the whole table and leave the files alone")
    args = parser.parse_args(argv)
    results = load()
    content = table(results)
    if args.print:
        print(content)
        return content
    for path, part in pages(results).items():
        path.write_text(replaced(path.read_text(encoding="utf-8"), part), encoding="utf-8")
    return content


if __name__ == "__main__":
    main()

"""Turn the JSON files of the benchmarks into the README's table: ``python -m benchmarks.report``.

The table stands between two markers in README.md; everything else there stays as it is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS
from benchmarks.machine import MISSING

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
ORDER = (
    *(
        "sampling",
        "typed_sampling",
        "minibatch",
        "epoch",
        "collective",
        "aggregate",
        "aggregate_update",
        "hyscale",
        "full_graph",
    ),
    *("gpu_minibatch", "gpu_epoch", "gpu_persistent", "gpu_collective", "gpu_aggregate", "gpu_hyscale"),
    "gpu_full_graph",
)


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Read the results there are, in the order of the table."""
    files = [folder / f"{name}.json" for name in ORDER]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table: one line per comparison, medians with their ratio, and what they were measured on.

    Behind a ratio stands its 95 % confidence interval, if the result has one.
    """
    lines = ["| measured | ours | peer | ratio |", "|---|---|---|---|"]
    for result in results:
        for comparison in result["comparisons"]:
            if "missing" in comparison:
                lines.append(f"| {comparison['what']} | | {comparison['missing']} | |")
                continue
            ours, peer = (
                f"{median:.3g} {result['unit']} ({comparison[side]})"
                for side, median in zip(("ours", "peer"), comparison["medians"], strict=True)
            )
            sure = " ({:.3g} to {:.3g})".format(*comparison["interval"]) if "interval" in comparison else ""
            lines.append(f"| {comparison['what']} | {ours} | {peer} | **{comparison['ratio']:.2g}x**{sure} |")
    notes = [f"- {result['title']}: {_machine(result)}" for result in results]
    return "\n".join([*lines, "", *notes])


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
    """Return ``text`` with ``content`` between the markers.

    Raises:
        ValueError: The markers are not there.
    """
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"README.md has no {START} … {END}; put both lines where the table belongs")
    return f"{before}{START}\n{content}\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser("python -m benchmarks.report", description=__doc__)
    parser.add_argument("--print", action="store_true", help="print the table and leave README.md alone")
    args = parser.parse_args(argv)
    content = table(load())
    if args.print:
        print(content)
    else:
        README.write_text(replaced(README.read_text(encoding="utf-8"), content), encoding="utf-8")
    return content


if __name__ == "__main__":
    main()

"""Writes the tables that follow from the systems, conf/ and results into the pages: ``python -m docs.tables``.

Only the text between two markers is replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.harness import RESULTS, replaced
from lightning_gnn.systems import PACKAGES, SYSTEMS, Plugin, System

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MEMBERS = {
    "CollectiveDataModule": "[plan]",
    "HyScaleStrategy": "[trainers, drift]",
    "PartitionedDataModule": "[owners_of_seeds]",
}
"""Methods and attributes that the reference lists."""


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the columns of its head are separated by " | "."""
    lines = [head, "|".join(["---"] * (head.count(" | ") + 1)), *(" | ".join(row) for row in rows)]
    return "\n".join(f"|{line}|" if line.startswith("---") else f"| {line} |" for line in lines)


def link(page: Path, target: str, text: str) -> str:
    """Return a link from a page to another one, which is given relative to docs/."""
    return f"[{text}]({os.path.relpath(DOCS / target, page.parent)})"


def systems(page: Path) -> str:
    """Return the systems with what they bring."""
    head = "system | use it when | what it does | how | state"
    rows = []
    for system in SYSTEMS:
        how = [f"`{plugin.name}`" for plugin in system.datamodules]
        how += [f'`Trainer(strategy="{plugin.option}")`' for plugin in system.strategies]
        rows.append((link(page, system.page, system.title), system.use_when, system.what, ", ".join(how), system.state))
    return table(head, rows)


def guides(page: Path) -> str:
    """Return the systems' pages by their headings."""
    rows = []
    for system in SYSTEMS:
        heading = (DOCS / system.page).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        same = heading.lower() == system.title.lower()
        rows.append((link(page, system.page, heading) + f" ({system.title})" * (not same), system.use_when))
    return table("system | use it when", rows)


def plugins(kind: str) -> list[tuple[System, Plugin]]:
    """Return the DataModules or the strategies, each behind its system."""
    return [(system, plugin) for system in SYSTEMS for plugin in getattr(system, kind)]


def _row(page: Path, system: System, plugin: Plugin, name: str) -> tuple[str, ...]:
    shown = link(page, plugin.page or system.page, f"`{name}`")
    return shown, f"`{plugin.option}`", plugin.what, plugin.use_when or system.use_when


def datamodules(page: Path) -> str:
    """Return the DataModules."""
    rows = (_row(page, system, plugin, plugin.name) for system, plugin in plugins("datamodules"))
    return table("class | `datamodule=` | what prepares mini-batches | use it when", rows)


def strategies(page: Path) -> str:
    """Return the strategies, Lightning's own first."""
    own = ('`"auto"`, `"ddp"`', "`auto`, `ddp`", "Lightning's own; on NPUs through hccl", "the devices are identical")
    rows = (_row(page, system, plugin, f'"{plugin.option}"') for system, plugin in plugins("strategies"))
    return table("`Trainer(strategy=…)` | `strategy=` | what it does | use it when", (own, *rows))


def packages(page: Path) -> str:
    """Return all packages, with the name of the system that each holds."""
    rows = []
    for package in PACKAGES:
        title = f"{package.title}: " if isinstance(package, System) else ""
        rows.append((f"`{package.package}`", title + package.what))
    return table("room | what it holds", rows)


def groups(page: Path) -> str:
    """Return the groups of the command and their options."""
    folders = (path for path in sorted((ROOT / "conf").iterdir()) if path.is_dir() and path.name[0] not in "._")
    options = {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in folders}
    rows = ((f"`{name}=`", ", ".join(f"`{each}`" for each in found)) for name, found in options.items() if found)
    return table("group | options", rows)


def entries(kind: str) -> str:
    """Return the entries of the reference for DataModules or strategies."""
    return "\n" + "".join(
        f"::: lightning_gnn.{plugin.name}\n    options:\n      members: {MEMBERS.get(plugin.name, 'false')}\n\n"
        for _, plugin in plugins(kind)
    )


def layer_kernels(page: Path) -> str:
    """Return what the layers' kernels take on a GPU, as compiled."""
    found = json.loads((RESULTS / "gpu_layers.json").read_text(encoding="utf-8"))
    head = "layer | kernel | registers | spilled | shared memory | warps | occupancy | read against ideal | written"
    rows = []
    for row in found["rows"]:
        ratios = [f"{row[kind][0] / row[kind][1]:.2f}" if kind in row else "" for kind in ("loads", "stores")]
        name, _, backward = row["kernel"].partition(",")
        used = f"{row['spilled']} B", f"{row['shared']} B", str(row["warps"]), f"{row['occupancy']:.0%}"
        rows.append((row["case"], f"`{name}`" + f",{backward}" * bool(backward), str(row["registers"]), *used, *ratios))
    sizes = f"{found['sources']:,} sources, {found['targets']:,} targets and {found['edges']:,} edges"
    return f"Triton {found['triton']}, sm_90; a layer of {sizes}.\n\n{table(head, rows)}"


TABLES = {
    "README.md": {"systems": systems},
    "docs/index.md": {"guides": guides},
    "docs/which-module.md": {"datamodules": datamodules, "strategies": strategies},
    "docs/architecture.md": {"packages": packages, "layer_kernels": layer_kernels},
    "docs/command-line.md": {"groups": groups},
    "docs/reference/index.md": {
        "datamodules": lambda page: entries("datamodules"), "strategies": lambda page: entries("strategies")
    },
}  # fmt: skip
"""The tables of each page, by the name of their markers."""


def pages() -> dict[Path, str]:
    """Return the pages, complete with their tables."""
    found = {}
    for name, tables in TABLES.items():
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        for marker, write in tables.items():
            text = replaced(text, write(page), f"<!-- {marker}:start -->", f"<!-- {marker}:end -->")
        found[page] = text
    return found


def main() -> None:
    """Write all tables."""
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

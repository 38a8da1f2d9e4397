"""Pages of ``docs/papers``: every figure and table of a paper, cell by cell, beside simulated and measured values."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, check_out, machine

PAGES = RESULTS.parents[1] / "docs" / "papers"
NEAR = 0.15
"""Relative distance from the paper above which a cell must state its reason."""


@dataclass
class Cell:
    """One value of a paper, and ours."""

    name: str
    paper: float | None = None
    simulated: float | None = None
    measured: float | None = None
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's; measured if possible."""
        ours = self.simulated if self.measured is None else self.measured
        return ours / self.paper if ours is not None and self.paper else None

    @property
    def is_far(self) -> bool:
        """Whether ours is further than ``NEAR`` from the paper."""
        return self.ratio is not None and not 1 / (1 + NEAR) <= self.ratio <= 1 + NEAR


@dataclass
class Table:
    """One figure or table of a paper; ``why`` is the reason for all cells without their own."""

    title: str
    unit: str
    cells: list[Cell]
    text: str = ""
    why: str = ""


@dataclass
class Page:
    """One paper. Raises a ValueError if a cell is far from the paper without a reason."""

    name: str
    title: str
    text: str
    tables: list[Table] = field(default_factory=list)

    def markdown(self) -> str:
        """Render the page."""
        parts = [f"# {self.title}\n\n{self.text.strip()}\n"]
        for table in self.tables:
            parts.append(f"## {table.title}\n")
            if table.text:
                parts.append(f"{table.text.strip()}\n")
            lines = [f"| {table.unit} | paper | simulated | measured | ours/paper | why |", "|---|---|---|---|---|---|"]
            for cell in table.cells:
                why = cell.why or (table.why if cell.is_far else "")
                if cell.is_far and not why:
                    raise ValueError(f"{table.title}, {cell.name}: {cell.ratio:.2f} times the paper needs a reason")
                values = [_number(value) for value in (cell.paper, cell.simulated, cell.measured)]
                ratio = "" if cell.ratio is None else f"**{cell.ratio:.2f}**" if cell.is_far else f"{cell.ratio:.2f}"
                lines.append(f"| {' | '.join([cell.name, *values, ratio, why])} |")
            parts.append("\n".join(lines) + "\n")
        return "\n".join(parts)

    def write(self, out: Path) -> None:
        """Write the JSON file, and the page made from it."""
        text = self.markdown()
        out.write_text(json.dumps({"machine": machine(), **asdict(self)}, indent=1) + "\n")
        if out == RESULTS / f"papers_{self.name}.json":
            (PAGES / f"{self.name}.md").write_text(text)
        else:
            out.with_suffix(".md").write_text(text)


def parse(name: str, description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line of one paper's script."""
    parser = argparse.ArgumentParser(f"python -m benchmarks.papers.{name}", description=description)
    parser.add_argument("--out", type=Path, default=RESULTS / f"papers_{name}.json", help="the JSON file")
    parser.add_argument("--quick", action="store_true", help="small settings, for tests of the script")
    args = parser.parse_args(argv)
    check_out(parser, args.out.parent)
    return args


def load(path: Path) -> Page:
    """Read a page back from its JSON file."""
    found: dict[str, Any] = json.loads(path.read_text())
    tables = [Table(**{**table, "cells": [Cell(**cell) for cell in table["cells"]]}) for table in found["tables"]]
    return Page(found["name"], found["title"], found["text"], tables)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"

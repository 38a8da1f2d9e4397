"""``lgnn convert``: tables of edges and nodes, of any size, as a folder that ``lgnn data=custom`` reads."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING
from rich.console import Console

from lightning_gnn.cli.command_line import UserError, explained
from lightning_gnn.cli.settings import parsed
from lightning_gnn.graph.convert import convert_tables
from lightning_gnn.report.console import say
from lightning_gnn.runtime.byte_sizes import memory_bytes

_SETTINGS = """settings:
  source=FILE              edges: columns source and target (or src and dst, or the first two), and attributes
  source.A__R__B=FILE      likewise of a graph with types, one for each type of edges
  nodes=FILE, nodes.A=FILE nodes: id (or numbered by row), label, split (train, val, test), time, features
  out=FOLDER               the folder to make
  memory=4GB               what the process may use; the rest lies on the disk meanwhile
  undirected=false         add the reverse of each edge, and keep each edge once
  random_features=0        draw so many features where there are none
  random_labels=0          draw labels of so many classes, and splits, where there are no labels
  rows=false               true: features as x.rows, for training with datamodule.memory=; or float16, bfloat16, int8
Files are .csv, .tsv, .txt (also .gz and .zst), .parquet, .arrow, or .npy of edges; a pattern as 'part-*.parquet' stands
for several. source= may also be a matrix of SciPy (.npz), a folder with indptr.npy and indices.npy (a row holds the
targets of a source), WebGraph's .graph-txt (also .gz), or a folder of OGB as ogbn_arxiv, with its nodes and split. What
an interrupted conversion has done is found again by the next one. Train on it with
  lgnn data=custom data.root=FOLDER"""


@dataclass
class _Settings:
    source: Any = MISSING
    out: str = MISSING
    nodes: Any = None
    memory: str = "4GB"
    undirected: bool = False
    random_features: int = 0
    random_labels: int = 0
    rows: Any = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; returns 2 where something about the files is wrong."""
    parser = argparse.ArgumentParser(
        "lgnn convert",
        description="Convert tables of edges and nodes to a folder for data=custom. They may be larger than memory.",
        epilog=_SETTINGS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="+", metavar="NAME=VALUE", help="see below")
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    try:
        with explained():
            chosen = parsed(_Settings, parser.parse_args(arguments).settings, "lgnn convert")
            start = time.perf_counter()
            with console.status("") as status:

                def tell(message: str) -> None:
                    status.update(message)
                    console.print(f"{time.perf_counter() - start:8.1f} s  {message}")

                counts = convert_tables(
                    chosen.source, chosen.out, chosen.nodes, memory_bytes(chosen.memory, "memory"), chosen.undirected,
                    chosen.random_features, chosen.random_labels, tell, chosen.rows,
                )  # fmt: skip
    except UserError as error:
        say(f"error: {error}", "red")
        return 2
    for name, count in counts.items():
        print(f"{count:>15,}  {name}")
    size = sum(path.stat().st_size for path in Path(chosen.out).rglob("*") if path.is_file())
    train = f"lgnn data=custom data.root={chosen.out}{' datamodule.memory=8GB' if chosen.rows else ''}"
    print(f"{size / 1e9:.3g} GB in {time.perf_counter() - start:.0f} s: {train}")
    return 0

"""``lgnn convert``: tables of edges and nodes, of any size, as a folder that ``lgnn data=custom`` reads."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from lightning_gnn.cli.command_line import UserError, explained
from lightning_gnn.cli.settings import gigabytes_in, parsed, print_with_time, typed_settings
from lightning_gnn.datasets.convert import convert_tables
from lightning_gnn.datasets.hetero_folder import is_hetero_folder, load_hetero_folder
from lightning_gnn.features.arrays import load_array
from lightning_gnn.report.console import say
from lightning_gnn.runtime.messages import memory_bytes

_SETTINGS = """settings:
  source=FILE              edges: columns source and target (or src and dst, or the first two), and attributes
  source.A__R__B=FILE      likewise of a graph with types, one for each type of edges
  nodes=FILE, nodes.A=FILE nodes: id (or numbered by row), label, split (train, val, test), time, features
  out=FOLDER               the folder to make
  memory=4GB               what the process may use; the rest lies on the disk meanwhile
  undirected=false         add the reverse of each edge, and keep each edge once
  random_features=0        draw so many features where there are none
  random_labels=0          draw labels of so many classes, and splits, where there are no labels
Files are text (.csv, .tsv, .txt, .edges, .edgelist, .cites, .content, .dat, .data; also .gz and .zst), .parquet,
.arrow, or .npy of edges; a pattern as 'part-*.parquet' stands for several. The command prints how it reads a text.
source= may also be a matrix of SciPy (.npz) or Matrix Market (.mtx), a folder with indptr.npy and indices.npy (a row
holds the targets of a source), WebGraph's .graph-txt (also .gz), or a folder of OGB as ogbn_arxiv, with its nodes and
split. Triples of head, relation and tail become a type of edges for each relation. What an interrupted conversion has
done is found again by the next one. Train on it with
  lgnn data=custom data.root=FOLDER"""

_SHOWN = 40  # types whose counts are printed


@dataclass
class _Settings:
    source: Any = MISSING
    out: str = MISSING
    nodes: Any = None
    memory: str = "4GB"
    undirected: bool = False
    random_features: int = 0
    random_labels: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; returns 2 where something about the files is wrong."""
    description = "Convert tables of edges and nodes to a folder for data=custom. They may be larger than memory."
    settings, start = typed_settings(arguments, "lgnn convert", description, _SETTINGS), time.perf_counter()
    try:
        with explained():
            chosen = parsed(_Settings, settings, "lgnn convert")
            counts = convert_tables(
                chosen.source, chosen.out, chosen.nodes, memory_bytes(chosen.memory, "memory"), chosen.undirected,
                chosen.random_features, chosen.random_labels, print_with_time(),
            )  # fmt: skip
    except UserError as error:
        say(f"error: {error}", "red")
        return 2
    for name, count in islice(counts.items(), _SHOWN):
        print(f"{count:>15,}  {name}")
    if len(counts) > _SHOWN:
        print(f"{'…':>15}  and {len(counts) - _SHOWN} more")
    train = f"lgnn {_task(Path(chosen.out))}data=custom data.root={chosen.out}"
    print(f"{gigabytes_in(chosen.out)} in {time.perf_counter() - start:.0f} s: {train}")
    return 0


def _task(out: Path) -> str:
    """Return the settings of a run that trains on a folder: what it is given to predict, and by which model."""
    if not is_hetero_folder(out):
        y = out / "y.npy"
        return "task=link " if not y.exists() else "task=regression " if load_array(y).is_floating_point() else ""
    data = load_hetero_folder(out, check=False)
    labeled = [name for name in data.node_types if "y" in data[name]]
    kinds = [kind for kind in data.edge_types if not kind[1].startswith("rev_")]
    timed = [kind for kind in kinds if "time" in data[kind]]
    task, targets = "task=link ", ["__".join(kind) for kind in timed or kinds]
    if labeled:
        task, targets = "task=regression " if data[labeled[0]].y.is_floating_point() else "", labeled
    elif timed:
        task = "task=recommend "
    both = {kind[2] for kind in data.edge_types} == {*data.node_types}
    target = f"task.target={targets[0]} " if len(targets) > 1 else ""
    return f"{task}model={'hetero_sage' if both else 'rgcn'} {target}"

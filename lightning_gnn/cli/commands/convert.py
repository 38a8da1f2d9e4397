"""``lgnn convert``: convert tables of edges and nodes, of any size, to a folder for ``lgnn data=custom``."""

import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from lightning_gnn.cli.command_line import UserError, raise_user_errors
from lightning_gnn.cli.settings import gigabytes_in, parse_settings, print_with_time, read_settings
from lightning_gnn.datasets.convert import convert_tables
from lightning_gnn.datasets.hetero_folder import is_hetero_folder, load_hetero_folder
from lightning_gnn.features.arrays import load_array
from lightning_gnn.report.console import say
from lightning_gnn.runtime.messages import memory_bytes

_SETTINGS = """settings:
  source=FILE              edges: columns source and target (or src and dst, or the first two), and attributes
  source.A__R__B=FILE      likewise for a heterogeneous graph, one for each edge type
  nodes=FILE, nodes.A=FILE nodes: id (or numbered by row), label, split (train, val, test), time, features
  out=FOLDER               the folder to make
  memory=4GB               memory that the process may use; the rest is stored on disk meanwhile
  undirected=false         add the reverse of each edge, and keep each edge once
  random_features=0        number of random features for nodes without features
  feature_dtype=float32    or float16 or bfloat16: store features in half of the bytes
  ids=auto                 compare ids as numbers if all are integers, else as texts; or always: number, text
  random_labels=0          number of classes of random labels, with splits, for nodes without labels
Files are text (.csv, .tsv, .txt, .edges, .edgelist, .cites, .content, .dat, .data; also .gz and .zst), .parquet,
.arrow, or .npy of edges; a pattern such as 'part-*.parquet' matches several. The command prints how it reads a text.
source= may also be a matrix of SciPy (.npz) or Matrix Market (.mtx), a folder with indptr.npy and indices.npy (a row
holds the targets of a source), WebGraph's .graph-txt (also .gz), or a folder of OGB such as ogbn_arxiv, with its nodes
and split. Triples of head, relation and tail become one edge type per relation. An interrupted conversion resumes when
it is started again. Train on it with
  lgnn data=custom data.root=FOLDER"""

_MAX_PRINTED_TYPES = 40


@dataclass
class _Settings:
    source: Any = MISSING
    out: str = MISSING
    nodes: Any = None
    memory: str = "4GB"
    undirected: bool = False
    random_features: int = 0
    random_labels: int = 0
    feature_dtype: str = "float32"
    ids: Any = "auto"


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert tables to a graph folder; return 2 for wrong settings or files, 130 for Ctrl-C."""
    description = "Convert tables of edges and nodes to a folder for data=custom. They may be larger than memory."
    settings, start = read_settings(arguments, "lgnn convert", description, _SETTINGS), time.perf_counter()
    try:
        with raise_user_errors():
            chosen = parse_settings(_Settings, settings, "lgnn convert")
            counts = convert_tables(
                chosen.source, chosen.out, chosen.nodes, memory_bytes(chosen.memory, "memory"), chosen.undirected,
                chosen.random_features, chosen.random_labels, print_with_time(), chosen.feature_dtype,
                chosen.ids,
            )  # fmt: skip
    except UserError as error:
        say(f"error: {error}", "red")
        return 2
    except KeyboardInterrupt:
        command = shlex.join(["lgnn", "convert", *settings])
        partial = f"{chosen.out}.partial"
        say(f"Interrupted. {partial} keeps the complete steps; remove it, or go on with\n  {command}", "yellow")
        return 128 + signal.SIGINT
    for name, count in islice(counts.items(), _MAX_PRINTED_TYPES):
        print(f"{count:>15,}  {name}")
    if len(counts) > _MAX_PRINTED_TYPES:
        print(f"{'…':>15}  and {len(counts) - _MAX_PRINTED_TYPES} more")
    train = f"lgnn {_task(Path(chosen.out))}data=custom data.root={chosen.out}"
    print(f"{gigabytes_in(chosen.out)} in {time.perf_counter() - start:.0f} s: {train}")
    return 0


def _task(out: Path) -> str:
    """Return the ``task``, ``model`` and target settings with which ``lgnn`` can train on a folder."""
    if not is_hetero_folder(out):
        y = out / "y.npy"
        return "task=link " if not y.exists() else "task=regression " if load_array(y).is_floating_point() else ""
    data = load_hetero_folder(out, check=False)
    labeled = [name for name in data.node_types if "y" in data[name]]
    edge_types = [edge_type for edge_type in data.edge_types if not edge_type[1].startswith("rev_")]
    timed = [edge_type for edge_type in edge_types if "time" in data[edge_type]]
    task, targets = "task=link ", ["__".join(edge_type) for edge_type in timed or edge_types]
    if labeled:
        task, targets = "task=regression " if data[labeled[0]].y.is_floating_point() else "", labeled
    elif timed:
        task = "task=recommend "
    # Only rgcn has outputs for node types without incoming edges.
    all_reached = {edge_type[2] for edge_type in data.edge_types} == {*data.node_types}
    target = f"task.target={targets[0]} " if len(targets) > 1 else ""
    return f"{task}model={'hetero_sage' if all_reached else 'rgcn'} {target}"

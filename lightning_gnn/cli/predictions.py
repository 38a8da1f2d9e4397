"""Files written by ``lgnn predict``: raw outputs (predictions.npy) or one row per node (predictions.parquet)."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from omegaconf import DictConfig
from torch import Tensor

from lightning_gnn.cli.command_line import absolute
from lightning_gnn.cli.targets import target_of
from lightning_gnn.datasets.hetero_folder import node_folder
from lightning_gnn.features.arrays import save_arrays
from lightning_gnn.partitioned.whole import outline
from lightning_gnn.runtime.files import whole_file
from lightning_gnn.runtime.urls import cached_path

FORMATS = ("npy", "parquet")
Column = npt.NDArray[np.generic] | list[str]
_ROWS_PER_GROUP = 1 << 17  # written at a time, so that memory-mapped outputs need not fit memory


def check_format(name: str) -> None:
    """Raise an error if predictions cannot be written in a format."""
    if name not in FORMATS:
        raise ValueError(f"predictions={name} is unknown; use one of {', '.join(FORMATS)}")
    if name == "parquet" and find_spec("pyarrow") is None:
        raise ModuleNotFoundError("predictions=parquet needs a package: pip install 'lightning-gnn[parquet]'")


def write_npy(rows: Tensor, path: Path) -> str:
    """Write the outputs, float32 ``[num_nodes, outputs]``; return a description of the file."""
    save_arrays(path.parent, {path.stem: rows})
    return f"{path.name}: float32 {list(rows.shape)}"


def write_parquet(rows: Tensor, path: Path, task: str, ids: Sequence[str] | None = None) -> str:
    """Write one row per node, see :func:`columns`; ``rows`` ``[num_nodes, outputs]`` may be memory-mapped."""
    import pyarrow as pa
    from pyarrow import parquet

    starts = range(0, len(rows), _ROWS_PER_GROUP)
    tables = (pa.table(columns(rows[start : start + _ROWS_PER_GROUP], task, start, ids)) for start in starts)
    first = next(tables, pa.table({"id": pa.array([], pa.int64())}))
    with whole_file(path) as file, parquet.ParquetWriter(file, first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)
    names = first.column_names
    return f"{path.name}: {len(rows)} rows of {', '.join(names if len(names) <= 5 else [*names[:3], '…', names[-1]])}"


def columns(
    rows: Tensor, task: str, begin: int = 0, ids: Sequence[str] | None = None
) -> dict[str, npt.NDArray[np.generic] | list[str]]:
    """Return ``id`` and the columns, float32 ``[n]``, for the outputs ``[n, outputs]`` of nodes ``begin`` and after.

    ``"node"``: ``class`` int64, the most likely one, and the probabilities ``p0``, …; ``"multilabel"``: ``p0``, …;
    ``"regression"``: ``value``, or ``value0``, …. ``ids`` are the names of all nodes, by default their numbers.
    """
    rows = rows.float()
    end, name, values = begin + len(rows), "p", rows
    found: dict[str, Column] = {}
    found["id"] = np.arange(begin, end) if ids is None else list(ids[begin:end])
    if task == "node":
        found["class"] = rows.argmax(1).numpy()
        values = rows.softmax(1)
    elif task == "multilabel":
        values = rows.sigmoid()
    else:
        name = "value"
    numbers = [np.ascontiguousarray(column.numpy()) for column in values.t()]
    alone = name == "value" and len(numbers) == 1
    return found | {name if alone else f"{name}{i}": column for i, column in enumerate(numbers)}


def node_names(cfg: DictConfig, target: str | None, count: int) -> list[str] | None:
    """Read the names of nodes from ``ids.txt``, one per line, in a graph's folder; return None without the file."""
    root = cfg.data.get("root")
    if root is None or target_of(cfg.data) is outline:  # partitions have no names
        return None
    folder = cached_path(absolute(root))
    path = (folder if target is None else node_folder(folder, target)) / "ids.txt"
    if not path.is_file():
        return None
    names = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if len(names) != count:
        raise ValueError(f"{path} has {len(names)} lines, but the graph has {count} nodes; write one line per node")
    return names


def as_rows(batches: Sequence[Tensor]) -> Tensor:
    """Concatenate outputs to one tensor; a single memory-mapped one is not copied."""
    rows = [batch.float().cpu() for batch in batches]
    return rows[0] if len(rows) == 1 else torch.cat(rows)

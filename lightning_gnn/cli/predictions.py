"""What ``lgnn predict`` leaves: outputs as they are (predictions.npy), or a table of nodes (predictions.parquet)."""

from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hydra.utils import to_absolute_path
from omegaconf import DictConfig
from torch import Tensor

from lightning_gnn.datasets.hetero_folder import node_folder
from lightning_gnn.runtime.files import whole_file

FORMATS = ("npy", "parquet")
_ROWS = 1 << 17  # of one group of a table, so that outputs in a file need not come into memory


def check_format(name: str) -> None:
    """Say why predictions cannot be written so."""
    if name not in FORMATS:
        raise ValueError(f"predictions={name} is unknown; use one of {', '.join(FORMATS)}")
    if name == "parquet" and find_spec("pyarrow") is None:
        raise ModuleNotFoundError("predictions=parquet needs a package: pip install 'lightning-gnn[parquet]'")


def write_npy(rows: Tensor, path: Path) -> str:
    """Write the outputs, float32 ``[num_nodes, outputs]``, and return what to say of the file."""
    try:
        np.save(path, rows.numpy())
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise OSError(f"{path} cannot be written ({error}); it needs {rows.numel() * 4} bytes") from error
    return f"{path.name}: float32 {list(rows.shape)}"


def write_parquet(rows: Tensor, path: Path, task: str, ids: Sequence[str] | None = None) -> str:
    """Write a table with a row for each node, see :func:`columns`, and return what to say of the file.

    Args:
        rows: Outputs ``[num_nodes, outputs]``; they may be memory-mapped.
    """
    import pyarrow as pa
    from pyarrow import parquet

    tables = (pa.table(columns(rows[begin : begin + _ROWS], task, begin, ids)) for begin in range(0, len(rows), _ROWS))
    first = next(tables, pa.table({"id": pa.array([], pa.int64())}))
    with whole_file(path) as file, parquet.ParquetWriter(file, first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)
    return f"{path.name}: {len(rows)} rows of {', '.join(_shortened(first.column_names))}"


def columns(rows: Tensor, task: str, begin: int = 0, ids: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the columns of the table.

    Args:
        rows: Outputs ``[n, outputs]`` of nodes that follow one another.
        task: ``"node"``: ``class`` int64, the likeliest one, and ``p0``, ``p1``, …, the probability of each class;
            ``"multilabel"``: ``p0``, …, the probability of each label; ``"regression"``: ``value``, or ``value0``, ….
        ids: What all nodes of the graph are called; by default they have numbers.

    Returns:
        float32 ``[n]``, where nothing else is said, and ``id``, int64 or text.
    """
    rows = rows.float()
    found: dict[str, Any] = {
        "id": np.arange(begin, begin + len(rows)) if ids is None else list(ids[begin : begin + len(rows)])
    }
    name, values = "p", rows
    if task == "node":
        found["class"] = rows.argmax(1).numpy()
        values = rows.softmax(1)
    elif task == "multilabel":
        values = rows.sigmoid()
    else:
        name = "value"
    if name == "value" and values.size(1) == 1:
        return found | {name: _array(values[:, 0])}
    return found | {f"{name}{i}": _array(values[:, i]) for i in range(values.size(1))}


def node_names(cfg: DictConfig, target: str | None, count: int) -> list[str] | None:
    """Read what nodes are called: ``ids.txt`` in the folder of a graph, one line for each; None where there is none."""
    root = cfg.data.get("root")
    if root is None:
        return None
    folder = Path(to_absolute_path(root))
    path = (folder if target is None else node_folder(folder, target)) / "ids.txt"
    if not path.is_file():
        return None
    names = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if len(names) != count:
        raise ValueError(f"{path} has {len(names)} lines, but there are {count} nodes; give it one line for each")
    return names


def as_rows(batches: Sequence[Tensor]) -> Tensor:
    """Return all outputs as one tensor; those that lie in a file stay there."""
    rows = [batch.float().cpu() for batch in batches]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _array(values: Tensor) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(values.numpy())


def _shortened(names: Sequence[str]) -> list[str]:
    return [*names] if len(names) <= 5 else [*names[:3], "…", names[-1]]

"""What ``lgnn predict`` leaves: outputs as they are (predictions.npy), or a table of nodes (predictions.parquet)."""

from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from hydra.utils import to_absolute_path
from omegaconf import DictConfig
from torch import Tensor

from lightning_gnn.datasets.hetero_folder import node_folder
from lightning_gnn.runtime.files import whole_file

FORMATS = ("npy", "parquet")
Column = npt.NDArray[np.generic] | list[str]
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
    """Write a row for each node, see :func:`columns`; ``rows`` ``[num_nodes, outputs]`` may be memory-mapped."""
    import pyarrow as pa
    from pyarrow import parquet

    tables = (pa.table(columns(rows[begin : begin + _ROWS], task, begin, ids)) for begin in range(0, len(rows), _ROWS))
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
    """Return the columns for outputs ``[n, outputs]`` of nodes from ``begin`` on, float32 ``[n]``, and ``id``.

    ``"node"``: ``class`` int64, the likeliest one, and the probabilities ``p0``, …; ``"multilabel"``: ``p0``, …;
    ``"regression"``: ``value``, or ``value0``, …. ``ids`` are what all nodes are called; by default they have numbers.
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

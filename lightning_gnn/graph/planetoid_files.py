"""The raw files of Planetoid. They are pickles: these are read without running what a pickle may ask for."""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, index_to_mask, remove_self_loops

from lightning_gnn.graph.arrays import check_file
from lightning_gnn.graph.csc import check_ids

SUFFIXES = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
_NUM_VALIDATION = 500


def read_planetoid(folder: Path, name: str) -> Data:
    """Read the eight files of a citation graph, as PyG's ``read_planetoid_data`` does, but checked.

    Args:
        folder: Where ``ind.<name>.x`` and the others lie.
        name: Their name, in any case.

    Returns:
        ``Data`` with ``x`` float32 ``[N, F]``, ``edge_index`` int64 ``[2, E]``, ``y`` int64 ``[N]`` and the three masks
        bool ``[N]`` of the public split.

    Raises:
        OSError: A file cannot be opened.
        ValueError: A file is damaged, does not fit to the others, or asks for code to be run.
    """
    paths = {suffix: folder / f"ind.{name.lower()}.{suffix}" for suffix in SUFFIXES}
    found: dict[str, Any] = {}
    for suffix, path in paths.items():
        check_file(path)
        content = path.read_bytes()
        try:
            found[suffix] = _READERS[suffix](content) if suffix in _READERS else _rows(content)
        except Exception as error:  # a damaged pickle can raise anything
            raise _damaged(path, f"{type(error).__name__}: {error}") from None
    for suffix, other in (("y", "x"), ("ally", "allx"), ("ty", "tx"), ("test.index", "tx")):
        if (rows := found[suffix].shape[0]) != (expected := found[other].shape[0]):
            raise _damaged(paths[suffix], f"it has {rows} rows, but {other} has {expected}")
    for of in (("allx", "tx", "x"), ("ally", "ty", "y")):
        widths = [found[suffix].shape[1] for suffix in of]
        if len(set(widths)) > 1:
            odd = next((suffix for suffix, width in zip(of, widths, strict=True) if widths.count(width) == 1), of[0])
            raise _damaged(paths[odd], f"{', '.join(of)} have {', '.join(map(str, widths))} columns")
    known, test = found["allx"].shape[0], torch.from_numpy(found["test.index"])
    if np.unique(found["test.index"]).size != test.numel() or int(test.min()) != known:
        raise _damaged(paths["test.index"], f"it must name nodes from {known} on, as allx has {known} rows, none twice")
    num_nodes = int(test.max()) + 1
    edge_index, num_lists = found["graph"]
    if num_lists != num_nodes:
        raise _damaged(paths["graph"], f"it has {num_lists} nodes, but the other files {num_nodes}")
    try:
        check_ids(edge_index[1], num_nodes, "it")
    except ValueError as error:
        raise _damaged(paths["graph"], str(error)) from None
    if found["y"].shape[0] + _NUM_VALIDATION > num_nodes:
        raise _damaged(paths["y"], f"it leaves no {_NUM_VALIDATION} of {num_nodes} nodes for validation")
    x, y = (_all_rows(found[first], found[last], test, num_nodes) for first, last in (("allx", "tx"), ("ally", "ty")))
    edge_index, _ = remove_self_loops(edge_index)
    num_train = found["y"].shape[0]
    return Data(
        x=x,
        edge_index=coalesce(edge_index, num_nodes=num_nodes, sort_by_row=False),
        y=y.max(dim=1)[1],
        train_mask=index_to_mask(torch.arange(num_train), size=num_nodes),
        val_mask=index_to_mask(torch.arange(num_train, num_train + _NUM_VALIDATION), size=num_nodes),
        test_mask=index_to_mask(test, size=num_nodes),
    )


def _all_rows(known: Any, tested: Any, test: Tensor, num_nodes: int) -> Tensor:
    # Some nodes of CiteSeer are in no file: their rows are zeros, and their class is 0.
    rows = torch.zeros(num_nodes, known.shape[1])
    rows[: known.shape[0]] = _dense(known)
    rows[test] = _dense(tested)
    return rows


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is damaged ({reason}); delete it, then download or copy it again")


class _DType:
    """Stands for ``numpy.dtype`` in a pickle: plain numbers alone."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        if not re.fullmatch("[iuf][1248]", code):
            raise pickle.UnpicklingError(f"it holds an array of {code!r}")
        self.value = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.value = self.value.newbyteorder(state[1])


class _Array:
    """Stands for ``numpy.ndarray``: NumPy itself trusts what it unpickles."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, content = state
        raw = content.encode("latin1") if isinstance(content, str) else content  # a str of Python 2
        flat = np.frombuffer(raw, dtype.value)
        if any(length < 0 for length in shape):
            raise pickle.UnpicklingError(f"it holds an array of the shape {shape}")
        self.value = flat.reshape(shape, order="F" if is_fortran else "C").astype(dtype.value.newbyteorder("="))


class _Sparse:
    """Stands for scipy's ``csr_matrix``."""

    def matrix(self) -> csr_matrix:
        state = self.__dict__
        parts = tuple(state[name].value for name in ("data", "indices", "indptr"))
        matrix = csr_matrix(parts, shape=state.get("_shape", state.get("shape")))
        matrix.check_format(full_check=True)  # scipy writes out of bounds where an index is
        return matrix


def _scalar(dtype: _DType, content: str | bytes) -> int | float:
    raw = content.encode("latin1") if isinstance(content, str) else content
    number: int | float = np.frombuffer(raw, dtype.value)[0].item()
    return number


def _encode(text: str, encoding: str) -> bytes:
    return text.encode({"latin1": "latin1"}[encoding])


_ADMITTED = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    ("_codecs", "encode"): _encode,
}
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
    _ADMITTED[_module, "_reconstruct"] = lambda *_: _Array()
    _ADMITTED[_module, "scalar"] = _scalar
for _module in ("scipy.sparse.csr", "scipy.sparse._csr"):
    _ADMITTED[_module, "csr_matrix"] = _Sparse
for _module in ("__builtin__", "builtins"):
    _ADMITTED[_module, "list"] = list
for _kind in (defaultdict, OrderedDict):
    _ADMITTED["collections", _kind.__name__] = _kind


# The unpickler in C takes room for as many objects as a damaged file says it has; the one in Python does not.
class _Unpickler(pickle._Unpickler):
    """Makes arrays, sparse matrices and containers, and nothing else."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    del dispatch[pickle.BYTEARRAY8[0]]  # as much room as the file says

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no file of numbers needs")
        return _ADMITTED[module, name]

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it changes a class")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def _unpickled(content: bytes) -> Any:
    file = io.BytesIO(content)
    found = _Unpickler(file, encoding="latin1").load()
    if file.read(1):
        raise pickle.UnpicklingError("something follows its end")
    return found


def _rows(content: bytes) -> csr_matrix | np.ndarray:
    found = _unpickled(content)
    rows = found.matrix() if isinstance(found, _Sparse) else found.value
    if len(rows.shape) != 2:
        raise ValueError(f"its shape is {rows.shape}")
    return rows


def _edges(content: bytes) -> tuple[Tensor, int]:
    lists = _unpickled(content)
    if sorted(lists) != list(range(len(lists))):
        raise ValueError(f"it must hold the neighbours of the nodes 0 to {len(lists) - 1}, but some are missing")
    rows = np.repeat(np.fromiter(lists, np.int64), [len(targets) for targets in lists.values()])
    columns = [column for targets in lists.values() for column in targets]
    if odd := {type(column).__name__ for column in columns} - {"int"}:
        raise ValueError(f"it holds {', '.join(sorted(odd))} among the nodes")
    return torch.from_numpy(np.stack([rows, np.array(columns, np.int64)])), len(lists)


def _index(content: bytes) -> np.ndarray:
    return np.array([int(line) for line in content.decode("ascii").split()], np.int64)


def _dense(rows: csr_matrix | np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(rows.todense() if hasattr(rows, "todense") else rows)).to(torch.float32)


_READERS: dict[str, Callable[[bytes], Any]] = {"graph": _edges, "test.index": _index}

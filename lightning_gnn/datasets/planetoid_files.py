"""Stands for ``pickle`` where PyG reads Planetoid's raw files: arrays and containers alone, and no code is run."""

import pickle
import re
from collections import OrderedDict, defaultdict
from typing import Any, ClassVar

import numpy as np
from scipy.sparse import csr_matrix


class DamagedFile(ValueError):
    """Says what is wrong with which file."""

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(reason)
        self.path = path


class _Part:
    """What a pickle says of an array, its dtype or a sparse matrix: NumPy and SciPy trust what they unpickle."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def value(self) -> np.ndarray | csr_matrix:
        if isinstance(self.state, dict):
            parts = tuple(self.state[name].value() for name in ("data", "indices", "indptr"))
            matrix = csr_matrix(parts, self.state.get("_shape", self.state.get("shape")))
            matrix.check_format(full_check=True)  # scipy writes out of bounds where an index is
            return matrix
        _, shape, dtype, is_fortran, content = self.state
        if not re.fullmatch("[iuf][1248]", code := dtype.given[0]):
            raise pickle.UnpicklingError(f"it holds an array of {code!r}")
        content = content.given[0] if isinstance(content, _Part) else content  # of _codecs.encode
        raw = content.encode("latin1") if isinstance(content, str) else content
        found = np.frombuffer(raw, np.dtype(code).newbyteorder(dtype.state[1]))
        return found.reshape(shape, order="F" if is_fortran else "C").astype(code)


_CONTAINERS: dict[str, type] = {"__builtin__.list": list, "builtins.list": list}
_CONTAINERS |= {f"collections.{kind.__name__}": kind for kind in (defaultdict, OrderedDict)}
_PARTS = r"numpy\.(ndarray|dtype|_?core\.multiarray\._reconstruct)|scipy\.sparse\._?csr\.csr_matrix|_codecs\.encode"


# The unpickler in C takes room for as many objects as a damaged file says it has; the one in Python does not.
class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    del dispatch[pickle.BYTEARRAY8[0]]  # as much room as the file says

    def find_class(self, module: str, name: str) -> Any:
        if found := _Part if re.fullmatch(_PARTS, f"{module}.{name}") else _CONTAINERS.get(f"{module}.{name}"):
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no file of numbers needs")


def load(file: Any, encoding: str) -> Any:
    """Return the array, sparse matrix or dictionary in an open file, or raise a ``DamagedFile``."""
    try:
        found = _Unpickler(file, encoding=encoding).load()
        return found.value() if isinstance(found, _Part) else found
    except Exception as error:  # a damaged pickle can raise anything
        raise DamagedFile(f"{type(error).__name__}: {error}", file.name) from None

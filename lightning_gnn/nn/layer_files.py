"""Storage of layer outputs in host memory, or in files if they do not fit."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from lightning_gnn.features.arrays import check_room, create_array, load_array
from lightning_gnn.runtime.store import discard, scratch
from lightning_gnn.runtime.urls import local_path


class LayerOutputs:
    """Stores layer outputs in host memory, or in files ``layer_<i>.npy`` of a folder, at most two at a time."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self._num_layers = folder, 0
        self._map: np.memmap | None = None

    def prepare(self, shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
        """Remove files of an earlier run, and check that the outputs of all layers will fit on the disk."""
        if self.folder is None:
            return
        self._num_layers = len(shapes)
        self.clear()
        sizes = [math.prod(shape) * _to_stored_dtype(dtype).itemsize for shape in shapes]
        for layer, size in enumerate(sizes):
            check_room(self._path(layer), size + (sizes[layer - 1] if layer else 0))

    def create_output(self, layer: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return the tensor that a layer writes to; that of a file has its disk space reserved."""
        if self.folder is None:
            return torch.empty(shape, dtype=dtype)
        self._map = create_array(self._path(layer), str(_to_stored_dtype(dtype)).split(".")[1], shape)
        return torch.from_numpy(self._map)

    def finish(self, layer: int, output: Tensor) -> Tensor:
        """Return the complete output, of a file mapped copy-on-write, and remove the file of the previous layer."""
        if self._map is None:
            return output
        self._map.flush()
        if layer:
            discard(self._path(layer - 1))
        return load_array(self._path(layer))

    def clear(self) -> None:
        """Remove the files of all layers; existing mappings stay valid."""
        for layer in range(self._num_layers):
            discard(self._path(layer))

    def _path(self, layer: int) -> Path:
        assert self.folder is not None
        return self.folder / f"layer_{layer}.npy"


@contextmanager
def layer_outputs(folder: str | Path | None, in_memory: bool) -> Iterator[LayerOutputs]:
    """Yield a storage for layer outputs, by default in a temporary folder; an error removes its files."""
    with ExitStack() as stack:
        if in_memory:
            yield LayerOutputs(None)
            return
        path = _create_folder(stack, folder)
        try:
            stack.enter_context(FileLock(path / "lock", timeout=0))
        except Timeout:
            raise RuntimeError(f"{path} is in use by another process; choose another folder for inference") from None
        files = LayerOutputs(path)
        try:
            yield files
        except BaseException:
            files.clear()
            raise


def _create_folder(stack: ExitStack, folder: str | Path | None) -> Path:
    """Create and return the folder for the files."""
    if folder is not None:
        path = local_path(folder)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            path /= f"rank_{torch.distributed.get_rank()}"
        path.mkdir(parents=True, exist_ok=True)
        return path
    temporary: Path | None = stack.enter_context(scratch("inference"))
    if temporary is not None:
        return temporary
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning_gnn-", ignore_cleanup_errors=True)))


def _to_stored_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype  # NumPy has no bfloat16

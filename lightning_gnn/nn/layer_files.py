"""Where the outputs of layers go: into host memory, or into files where they do not fit."""

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


class Outputs:
    """The outputs of layers in host memory."""

    def prepare(self, shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
        """Raise an OSError unless there is room for the outputs of all layers."""

    def layer_output(self, layer: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return what a layer writes to."""
        return torch.empty(shape, dtype=dtype)

    def finished(self, layer: int, output: Tensor) -> Tensor:
        """Return the output of a layer that is written, for the next layer or as the result."""
        return output


class OutputFiles(Outputs):
    """The outputs of layers as files ``layer_<i>.npy``, of which two are there at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._num_layers = folder, 0
        self._map: np.memmap | None = None

    def prepare(self, shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
        """Check now whether the last layer will fit too; remove what an earlier run has left."""
        self._num_layers = len(shapes)
        self.clear()
        sizes = [math.prod(shape) * _stored_dtype(dtype).itemsize for shape in shapes]
        for layer, size in enumerate(sizes):
            check_room(self._path(layer), size + (sizes[layer - 1] if layer else 0))

    def layer_output(self, layer: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return what a layer writes to, its room on the disk reserved."""
        self._map = create_array(self._path(layer), str(_stored_dtype(dtype)).split(".")[1], shape)
        return torch.from_numpy(self._map)

    def finished(self, layer: int, output: Tensor) -> Tensor:
        """Return the output, mapped so that writes never reach the file; remove that of the layer before."""
        assert self._map is not None
        self._map.flush()
        if layer:
            discard(self._path(layer - 1))
        return load_array(self._path(layer))

    def clear(self) -> None:
        """Remove the files of all layers; what has mapped one keeps its rows."""
        for layer in range(self._num_layers):
            discard(self._path(layer))

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer_{layer}.npy"


@contextmanager
def layer_outputs(folder: str | Path | None, in_memory: bool) -> Iterator[Outputs]:
    """Yield where the outputs of layers go, by default a temporary folder; an interrupted run leaves none of them."""
    with ExitStack() as stack:
        if in_memory:
            yield Outputs()
            return
        chosen = _place(stack, folder)
        try:
            stack.enter_context(FileLock(chosen / "lock", timeout=0))
        except Timeout:
            raise RuntimeError(f"{chosen} is in use by another process; choose another folder for inference") from None
        files = OutputFiles(chosen)
        try:
            yield files
        except BaseException:
            files.clear()
            raise


def _place(stack: ExitStack, folder: str | Path | None) -> Path:
    """Return the folder for the files, made."""
    if folder is not None:
        chosen = Path(folder)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            chosen /= f"rank_{torch.distributed.get_rank()}"
        chosen.mkdir(parents=True, exist_ok=True)
        return chosen
    part: Path | None = stack.enter_context(scratch("inference"))
    if part is not None:
        return part
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning_gnn-", ignore_cleanup_errors=True)))


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype  # NumPy has no bfloat16

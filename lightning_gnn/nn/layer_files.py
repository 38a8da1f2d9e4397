"""The outputs of layers in files, and what an interrupted run needs to go on."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from lightning_gnn.graph.user_cache import cache_folder, checksum

_SECONDS = 1.0
"""From one note of the finished rows to the next."""


class Outputs:
    """The outputs of layers in host memory."""

    layer = 0
    rows = 0

    def resumed(self, x: Tensor) -> Tensor:
        """Return the output with which to go on."""
        return x

    def layer_output(self, layer: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return what a layer writes to."""
        return torch.empty(shape, dtype=dtype)

    def result(self, source: Tensor) -> Tensor:
        """Return the output of the last layer."""
        return source

    def finished(self, layer: int, rows: int) -> None:
        """Note that so many rows of a layer are written, the layers before it whole."""
        self.layer, self.rows = layer, rows


class OutputFiles(Outputs):
    """The outputs of layers as files ``layer_<i>.npy``, and a note of what is written, ``state.json``."""

    def __init__(self, folder: Path, identity: str | None, num_layers: int) -> None:
        self.folder, self.identity, self.num_layers = folder, identity, num_layers
        self._map: np.memmap | None = None
        self._noted = 0.0
        state = None if identity is None else self._read()
        if state is not None and state["checksum"] == identity and self._whole(state):
            self.layer, self.rows = state["layer"], state["rows"]
            return
        if state is not None and state["checksum"] != identity:
            # Outputs that are complete are replaced without a word, as after each epoch of training.
            if state["layer"] < state["layers"]:
                rank_zero_warn(
                    f"{folder} holds outputs of an interrupted run on another model, graph or features; they are "
                    "overwritten"
                )
        elif state is not None:
            rank_zero_warn(f"{folder} lacks layer outputs of the interrupted run; everything is computed again")
        self.note()  # before a file is touched that the old note tells of

    def resumed(self, x: Tensor) -> Tensor:
        """Return the output with which to go on."""
        return x if self.layer == 0 else _open(self._path(self.layer - 1))

    def layer_output(self, layer: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return what a layer writes to."""
        path = self._path(layer)
        kept = torch.float32 if dtype == torch.bfloat16 else dtype  # NumPy has no bfloat16
        if self.rows == 0:
            np.lib.format.open_memmap(path, mode="w+", dtype=str(kept).split(".")[1], shape=shape).flush()
        self._map = np.lib.format.open_memmap(path, mode="r+")
        return torch.from_numpy(self._map)

    def result(self, source: Tensor) -> Tensor:
        """Return the output of the last layer; writes never reach the file."""
        return _open(self._path(self.layer - 1))

    def finished(self, layer: int, rows: int) -> None:
        """Note it, once a second and at the end of a layer."""
        super().finished(layer, rows)
        if rows == 0 or time.monotonic() - self._noted >= _SECONDS:
            self.note()
            if rows == 0 and layer > 1:
                self._path(layer - 2).unlink(missing_ok=True)

    def note(self) -> None:
        """Write the rows, and then that they are written."""
        if self._map is not None:
            self._map.flush()
        state = {"checksum": self.identity, "layer": self.layer, "rows": self.rows, "layers": self.num_layers}
        part = self.folder / "state.part"
        part.write_text(json.dumps(state))
        os.replace(part, self.folder / "state.json")
        self._noted = time.monotonic()

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer_{layer}.npy"

    def _read(self) -> dict[str, Any] | None:
        try:
            state = json.loads((self.folder / "state.json").read_text())
            return {"checksum": state["checksum"], **{name: int(state[name]) for name in ("layer", "rows", "layers")}}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _whole(self, state: dict[str, Any]) -> bool:
        needed = [state["layer"] - 1] * (state["layer"] > 0) + [state["layer"]] * (state["rows"] > 0)
        return all(self._path(layer).is_file() for layer in needed)


@contextmanager
def layer_outputs(
    folder: str | Path | None, in_memory: bool, num_layers: int, parts: tuple[Any, ...] | None
) -> Iterator[Outputs]:
    """Yield where the outputs of layers go; on the way out, note what is written, and remove what nobody needs.

    Args:
        folder: Where the files go; None: a folder in the user's cache directory, which is removed once all is done.
        in_memory: Hold the outputs in host memory instead.
        num_layers: Number of layers.
        parts: What the outputs depend on (tensors, dictionaries of them, or anything with a ``repr``), to tell whether
            those of an interrupted run can be used; None starts anew.

    Raises:
        RuntimeError: Another process writes to the folder.
    """
    if in_memory:
        yield Outputs()
        return
    name = None
    if parts is not None:
        flat = [part.items() if isinstance(part, dict) else [(part,)] for part in parts]
        name = checksum(*(value for pairs in flat for pair in pairs for value in pair))
    if folder is not None:
        chosen = Path(folder)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            chosen /= f"rank_{torch.distributed.get_rank()}"
    else:
        chosen = cache_folder("inference") / (f"{os.getpid()}-{time.time_ns()}" if name is None else name)
    chosen.mkdir(parents=True, exist_ok=True)
    lock = FileLock(chosen / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RuntimeError(f"{chosen} is in use by another process; choose another folder for inference") from None
    done = False
    files = OutputFiles(chosen, name, num_layers)
    try:
        yield files
        done = True
    finally:
        if not done:
            files.note()
            if name is not None:
                rank_zero_warn(f"Stopped in layer {files.layer + 1}; the same run again goes on from {chosen}")
        lock.release()
        if (done and folder is None) or (not done and name is None and folder is None):
            # On Linux and macOS a mapped file lives on without a name; elsewhere it stays where it is.
            shutil.rmtree(chosen, ignore_errors=True)


def _open(path: Path) -> Tensor:
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))

"""The outputs of layers in files, and what an interrupted run needs to go on."""

from __future__ import annotations

import json
import math
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from lightning_gnn.graph.arrays import check_room, create_array, load_array
from lightning_gnn.runtime.files import read_json, read_text, write_whole
from lightning_gnn.runtime.store import cache_root, checksum, discard, is_writable, remove, say_once, scratch, sweep

_SECONDS = 1.0
"""From one note of the finished rows to the next."""
_BLOCK = 1 << 24
"""Bytes that are summed at a time."""


class Outputs:
    """The outputs of layers in host memory."""

    layer = 0
    rows = 0

    def resumed(self, x: Tensor, orders: Sequence[Tensor]) -> Tensor:
        """Return the output with which to go on.

        Args:
            x: Features ``[N, F]``.
            orders: For each layer the vertices in the order in which their rows are written, integer ``[R]``; one that
                comes several times in a row counts once.
        """
        return x

    def prepare(self, shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
        """Raise an OSError unless there is room for the outputs of all layers."""

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
    """The outputs of layers as files ``layer_<i>.npy``, and ``state.json``: what is written, with checksums."""

    def __init__(self, folder: Path, identity: str | None, num_layers: int) -> None:
        self.folder, self.identity, self.num_layers = folder, identity, num_layers
        self._map: np.memmap | None = None
        self._noted = 0.0
        self._orders: Sequence[Tensor] = ()
        # Checksums of the layer that was finished last, and of the rows of the next one. CRC-32 keeps up with the disk,
        # and nobody forges what lies here.
        self._last = self._running = 0
        state = None if identity is None else self._read()
        self._found = state if state is not None and state["checksum"] == identity else None
        if self._found is not None:
            return
        # Outputs that are complete are replaced without a word, as after each epoch of training.
        if state is not None and state["layer"] < state["layers"]:
            rank_zero_warn(
                f"{folder} holds outputs of an interrupted run on another model, graph or features; they are "
                "overwritten"
            )
        if state is None:
            discard(folder / "state.json")
        self.note()  # before a file is touched that the old note tells of

    @property
    def begun(self) -> bool:
        """Whether there is something to go on with."""
        return self._found is not None or (self.layer, self.rows) != (0, 0)

    def resumed(self, x: Tensor, orders: Sequence[Tensor]) -> Tensor:
        """Return the output with which to go on: what was noted, as far as it is still there as it was written."""
        self._orders = orders
        if self._found is None:
            return x
        layer, rows = self._found["layer"], self._found["rows"]
        self._last = self._found["last"]
        if layer > 0 and not self._is_intact(layer - 1, orders[layer - 1].numel(), self._last):
            rank_zero_warn(
                f"{self.folder} lacks layer outputs of the interrupted run, or they were damaged; everything is "
                "computed again"
            )
            layer, rows, self._last = 0, 0, 0
        elif rows > 0 and not self._is_intact(layer, rows, self._found["running"]):
            rank_zero_warn(
                f"{self.folder}: the outputs of layer {layer + 1} are missing or were damaged; the layer is computed "
                "again"
            )
            rows = 0
        if rows == 0:
            self._running = 0
        self.layer, self.rows, self._found = layer, rows, None
        self.note()
        return x if layer == 0 else load_array(self._path(layer - 1))

    def prepare(self, shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
        """Look now whether the last layer will fit too: two layers are there at a time."""
        missing = [0] * len(shapes)
        for layer in range(self.layer + (self.rows > 0), len(shapes)):
            # Of a run before. Whoever has mapped it keeps what is in it.
            discard(self._path(layer))
            missing[layer] = math.prod(shapes[layer]) * _stored_dtype(dtype).itemsize
        for layer in range(self.layer, len(shapes)):
            check_room(self._path(layer), missing[layer] + (missing[layer - 1] if layer else 0))

    def layer_output(self, layer: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return what a layer writes to, its room on the disk reserved."""
        path = self._path(layer)
        if self.rows == 0:
            self._map = create_array(path, str(_stored_dtype(dtype)).split(".")[1], shape)
            self._running = zlib.crc32(_description(self._map))
        else:
            self._map = np.lib.format.open_memmap(path, mode="r+")
        return torch.from_numpy(self._map)

    def result(self, source: Tensor) -> Tensor:
        """Return the output of the last layer; writes never reach the file."""
        return load_array(self._path(self.layer - 1))

    def finished(self, layer: int, rows: int) -> None:
        """Note it, once a second and at the end of a layer."""
        if rows > self.rows and self._map is not None and self.identity is not None:
            self._running = _checksum_on(self._running, self._map, self._orders[layer][self.rows : rows])
        super().finished(layer, rows)
        if rows == 0:
            self._last = self._running
        if rows == 0 or time.monotonic() - self._noted >= _SECONDS:
            self.note()
            if rows == 0 and layer > 1:
                self._path(layer - 2).unlink(missing_ok=True)

    def note(self) -> None:
        """Write the rows, and then that they are written."""
        if self._map is not None:
            self._map.flush()
        sums = {"last": self._last, "running": self._running}
        state = {"checksum": self.identity, "layer": self.layer, "rows": self.rows, "layers": self.num_layers, **sums}
        if self._found is None:  # else nothing was looked at yet, and the old note holds
            try:
                write_whole(self.folder / "state.json", json.dumps(state))
            except OSError as error:  # an old note is never wrong: rows are only added
                say_once(
                    f"{self.folder}: the finished rows cannot be noted ({error}); an interrupted run does them again"
                )
        self._noted = time.monotonic()

    def _is_intact(self, layer: int, rows: int, expected: int) -> bool:
        """Tell whether the first rows of a layer are in its file as they were written; leaves their sum."""
        path = self._path(layer)
        try:
            found = load_array(path).numpy()
            self._running = _checksum_on(zlib.crc32(_description(found)), found, self._orders[layer][:rows])
        except (OSError, ValueError, TypeError, IndexError):
            return False
        return self._running == expected

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer_{layer}.npy"

    def _read(self) -> dict[str, Any] | None:
        try:
            state = read_json(read_text(self.folder / "state.json"))
            numbers = {name: int(state[name]) for name in ("layer", "rows", "layers", "last", "running")}
            if not 0 <= numbers["layer"] <= self.num_layers or numbers["rows"] < 0:
                return None
            return {"checksum": state["checksum"], **numbers}
        except (OSError, ValueError, KeyError, TypeError):
            return None


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
        OSError: The disk has no room for the outputs.
        RuntimeError: Another process writes to the folder.
    """
    if in_memory:
        yield Outputs()
        return
    name = None
    if parts is not None:
        flat = [part.items() if isinstance(part, dict) else [(part,)] for part in parts]
        name = checksum(*(value for pairs in flat for pair in pairs for value in pair))
    with ExitStack() as stack:
        chosen = _place(stack, folder, name)
        if chosen is None:
            yield Outputs()
            return
        try:
            stack.enter_context(FileLock(chosen / "lock", timeout=0))
        except Timeout:
            raise RuntimeError(f"{chosen} is in use by another process; choose another folder for inference") from None
        files = OutputFiles(chosen, name, num_layers)
        cached = folder is None and chosen.name == name
        done = False
        try:
            yield files
            done = True
        finally:
            if not done and name is not None:
                files.note()
                if files.begun and (folder is not None or cached):
                    rank_zero_warn(f"Stopped in layer {files.layer + 1}; the same run again goes on from {chosen}")
            if cached and (done or not files.begun):
                # On Linux and macOS a mapped file lives on without a name; elsewhere it stays where it is.
                with suppress(OSError):
                    remove(chosen)


def _place(stack: ExitStack, folder: str | Path | None, name: str | None) -> Path | None:
    """Return the folder for the files, made; None where the outputs must stay in memory."""
    if folder is not None:
        chosen = Path(folder)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            chosen /= f"rank_{torch.distributed.get_rank()}"
        chosen.mkdir(parents=True, exist_ok=True)
        return chosen
    root = cache_root()
    if name is None:
        part: Path | None = stack.enter_context(scratch("inference"))
        if part is not None:
            return part
    elif root is not None and is_writable(root):
        try:
            sweep(root, "inference")
            kept = root / "inference" / name
            kept.mkdir(mode=0o700, parents=True, exist_ok=True)
            return kept
        except OSError as error:
            say_once(f"layer outputs cannot be kept in {root} ({error}); an interrupted run begins anew")
    try:
        return Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning_gnn-", ignore_cleanup_errors=True))
        )
    except OSError as error:
        say_once(f"there is no folder for layer outputs ({error}); they are held in memory")
        return None


def _description(rows: np.ndarray) -> bytes:
    return f"{rows.dtype} {rows.shape} {rows.flags.c_contiguous};".encode()


def _checksum_on(running: int, rows: np.ndarray, order: Tensor) -> int:
    """Add rows to a checksum, in an order that does not depend on the blocks in which they were computed."""
    vertices = torch.unique_consecutive(order)
    step = max(1, _BLOCK // max(1, rows.dtype.itemsize * rows.shape[1]))
    for part in vertices.split(step):
        running = zlib.crc32(np.ascontiguousarray(rows[part.numpy()]).data, running)
    return running


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype  # NumPy has no bfloat16

"""Features in one file whose rows a disk can give one by one: none lies across more blocks than it must."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gnn.graph.arrays import check_file, load_array, new_file, read_in_order
from lightning_gnn.graph.features import FEATURE_DTYPES, STANDS_FOR, FeatureTable, check_finite_rows, file_of
from lightning_gnn.runtime.byte_sizes import shown
from lightning_gnn.runtime.files import read_json
from lightning_gnn.runtime.mapped_files import MappedFiles
from lightning_gnn.runtime.memory_info import available_bytes

BLOCK_BYTES = 4096
"""What a disk reads at least, and where direct reads begin and end."""
VERSION = 1
_MAGIC = "lightning-gnn rows"
ROW_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
_SCALE_BYTES = 4
_WRITTEN_AT_ONCE = 1 << 14
_READ_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class RowFile:
    """Where the rows of a file lie: ``rows_per_group`` side by side, one group every ``group_bytes``.

    Args:
        path: The file.
        dtype: float32, float16 or bfloat16, or int8, where each row begins with its scale, a float32.
        num_rows: Rows.
        num_columns: Features of a row.
        offset: Where the first row begins, in bytes.
        rows_per_group: Rows of a group.
        group_bytes: From the beginning of a group to that of the next one.
        checksums_at: Where a checksum of each block of rows begins, or 0: there are none.
    """

    path: str
    dtype: torch.dtype
    num_rows: int
    num_columns: int
    offset: int
    rows_per_group: int
    group_bytes: int
    checksums_at: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, with its scale."""
        if self.dtype == torch.int8:
            return _SCALE_BYTES + self.num_columns
        return self.num_columns * self.dtype.itemsize

    @property
    def read_dtype(self) -> torch.dtype:
        """What rows are once they are read: of int8, float32."""
        return torch.float32 if self.dtype == torch.int8 else self.dtype

    @property
    def num_blocks(self) -> int:
        """Blocks of rows, from the one that holds the first row on."""
        end = self.offset + -(-self.num_rows // self.rows_per_group) * self.group_bytes
        return -(-end // BLOCK_BYTES) - self.offset // BLOCK_BYTES

    @classmethod
    def open(cls, path: str | Path) -> RowFile:
        """Read where the rows of a file lie: one that :func:`write_rows` wrote, or a ``.npy`` file.

        Raises:
            FileNotFoundError: There is no such file.
            TypeError: Its numbers are no features.
            ValueError: It is truncated, damaged, of another version, or no table.
        """
        path = Path(path)
        check_file(path)
        if path.suffix == ".npy":
            values = load_array(path)
            if values.dtype not in FEATURE_DTYPES:
                hint = ", whose scales lie elsewhere; write_rows keeps both together"
                hint = hint if values.dtype == torch.int8 else ""
                raise TypeError(f"{path}: features must be float32, float16 or bfloat16, but are {values.dtype}{hint}")
            if values.dim() != 2 or not values.numel() or not values.is_contiguous():
                shape = f"{list(values.shape)}{'' if values.is_contiguous() else ', by column'}"
                raise ValueError(f"{path}: features must be rows [num_nodes, num_features], but are {shape}")
            rows, columns = (int(length) for length in values.shape)
            start = path.stat().st_size - values.nbytes
            return cls(str(path), values.dtype, rows, columns, start, 1, values.nbytes // rows)
        with path.open("rb") as file:
            head, size = file.read(BLOCK_BYTES), os.fstat(file.fileno()).st_size
        return cls._from_header(path, head, size)

    @classmethod
    def _from_header(cls, path: Path, head: bytes, size: int) -> RowFile:
        try:
            about: Any = read_json(head.rstrip(b"\0").decode())
            if about["format"] != _MAGIC:
                raise ValueError("another format")
        except (KeyError, TypeError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{path} is no file of write_rows, or its head is damaged; write it again") from error
        if about.get("version") != VERSION:
            raise ValueError(f"{path} has version {about.get('version')!r} of the format, but {VERSION} is read here")
        try:
            dtype, rows, columns = ROW_DTYPES[about["dtype"]], int(about["rows"]), int(about["columns"])
            made = _layout(str(path), dtype, rows, columns, bool(about["checksums"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: its head is damaged ({error!r}); write it again") from error
        if size != (whole := _size(made)):
            raise ValueError(f"{path} has {size} bytes, but its head tells of {whole}; write it again")
        return made

    @classmethod
    def behind(cls, values: Tensor) -> RowFile | None:
        """Return the file that a memory-mapped table shows, or that a table stands for; None if it lies in memory.

        Args:
            values: float32, float16 or bfloat16 ``[num_nodes, num_features]``.
        """
        stands_for: RowFile | None = file_of(values)
        if stands_for is not None:
            return stands_for
        if values.dtype not in FEATURE_DTYPES or values.dim() != 2 or not values.is_contiguous():
            return None
        if (part := MappedFiles().find(values)) is None:
            return None
        offset = part.offset + values.storage_offset() * values.element_size()
        rows, columns = (int(length) for length in values.shape)
        return cls(part.path, values.dtype, rows, columns, int(offset), 1, columns * values.element_size())

    def stand_in(self) -> Tensor:
        """Return NaN ``[num_rows, num_columns]`` that takes no memory, and by which :meth:`behind` finds this file."""
        values = torch.full((1, 1), float("nan"), dtype=self.read_dtype).expand(self.num_rows, self.num_columns)
        setattr(values, STANDS_FOR, self)
        return values

    def read(self) -> Tensor:
        """Return all rows, read into memory and compared with their checksums where there are any.

        Returns:
            ``[num_rows, num_columns]`` of ``read_dtype``.

        Raises:
            ValueError: It is damaged, or there is less memory free than it takes.
        """
        nbytes = self.num_rows * self.num_columns * self.read_dtype.itemsize
        if nbytes > (free := available_bytes() or 0):
            raise ValueError(
                f"{self.path} takes {shown(nbytes)} in memory, of which {shown(free)} are free: leave it on disk with "
                "the DataModule's memory=, such as datamodule.memory=8GB (and load_folder(…, memory='8GB'))"
            )
        out = torch.empty((self.num_rows, self.num_columns), dtype=self.read_dtype)
        sums = self.read_checksums() if self.checksums_at else None
        per, width = self.rows_per_group, self.row_bytes
        step = max(1, _READ_AT_ONCE // self.group_bytes)
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for first in range(0, -(-self.num_rows // per), step):
                part = out[first * per : (first + step) * per]
                groups = np.fromfile(file, np.uint8, -(-part.size(0) // per) * self.group_bytes)
                if sums is not None:
                    blocks = self.group_bytes // BLOCK_BYTES
                    expected = sums[first * blocks : first * blocks + groups.size // BLOCK_BYTES]
                    if not np.array_equal(block_sums(groups.view(np.uint64), BLOCK_BYTES // 8), expected):
                        raise ValueError(f"{self.path} is damaged: a checksum does not fit; write it again")
                rows = groups.reshape(-1, self.group_bytes)[:, : per * width].reshape(-1, width)[: part.size(0)]
                self._decode(rows, part)
        return out

    def read_some(self, ids: Tensor) -> Tensor:
        """Return a few rows, read one by one; :class:`DiskFeatures` reads many.

        Args:
            ids: Which, int64 ``[n]``.

        Returns:
            ``[n, num_columns]`` of ``read_dtype``.

        Raises:
            ValueError: The file is truncated.
        """
        raw = np.empty((ids.numel(), self.row_bytes), np.uint8)
        with open(self.path, "rb", buffering=0) as file:
            for place, row in enumerate(ids.tolist()):
                group, within = divmod(row, self.rows_per_group)
                file.seek(self.offset + group * self.group_bytes + within * self.row_bytes)
                if file.readinto(raw[place].data) != self.row_bytes:
                    raise ValueError(f"{self.path} ends before row {row}: it is truncated; write it again")
        out = torch.empty((ids.numel(), self.num_columns), dtype=self.read_dtype)
        self._decode(raw, out)
        return out

    def _decode(self, rows: npt.NDArray[np.uint8], out: Tensor) -> None:
        """Turn rows as they lie in the file, uint8 ``[n, row_bytes]``, into numbers."""
        if self.dtype == torch.int8:
            scales = torch.from_numpy(rows[:, :_SCALE_BYTES].copy().view(np.float32))
            torch.mul(torch.from_numpy(rows[:, _SCALE_BYTES:].view(np.int8)), scales, out=out)
        else:
            out.view(torch.uint8).copy_(torch.from_numpy(rows))

    def read_checksums(self) -> npt.NDArray[np.uint32]:
        """Return the checksum of each block of rows, uint32 ``[num_blocks]``.

        Raises:
            ValueError: There are none.
        """
        if not self.checksums_at:
            raise ValueError(f"{self.path} has no checksums to verify; write it with write_rows(…, checksums=True)")
        return np.fromfile(self.path, np.uint32, self.num_blocks, offset=self.checksums_at)


def write_rows(
    values: Tensor | FeatureTable, path: str | Path, dtype: torch.dtype | str | None = None, checksums: bool = True
) -> RowFile:
    """Write features as a file of which any row can be read with as few blocks as possible, block by block.

    Rows are not split between blocks of 4096 bytes; those longer than a block begin with one.

    Args:
        values: float32, float16 or bfloat16 ``[num_nodes, num_features]``, which may be memory-mapped.
        path: The file; it gets its name once it is whole.
        dtype: What to keep; ``"int8"`` keeps a scale with each row, as :meth:`FeatureTable.quantized` does.
        checksums: Keep 4 bytes per block, so that a damaged row is found when it is read.

    Raises:
        OSError: The disk has no room for it; what was there before is still there.
        TypeError: Another dtype.
        ValueError: A wrong shape, or rows that are not finite for int8.

    Examples:
        >>> import tempfile
        >>> import torch
        >>> from lightning_gnn.graph import DiskFeatures, write_rows
        >>> path = tempfile.mkdtemp() + "/x.rows"
        >>> _ = write_rows(torch.arange(6.0).view(3, 2), path)
        >>> DiskFeatures(path, memory="3MB").gather(torch.tensor([2, 0]))
        tensor([[4., 5.],
                [0., 1.]])
    """
    path = Path(path)
    table = values if isinstance(values, FeatureTable) else FeatureTable(values)
    kept = table.values.dtype if dtype is None else ROW_DTYPES.get(str(dtype).removeprefix("torch."))
    if kept is None or (table.scales is not None and kept != torch.int8):
        raise TypeError(f"features cannot be kept as {dtype!r}; use one of {', '.join(ROW_DTYPES)}")
    if path.suffix == ".npy":
        raise ValueError(f"{path}: give another suffix, such as .rows, as it will be no .npy file")
    made = _layout(str(path), kept, table.num_nodes, table.num_features, checksums)
    path.parent.mkdir(parents=True, exist_ok=True)
    name = next(name for name, each in ROW_DTYPES.items() if each == kept)
    about = {"format": _MAGIC, "version": VERSION, "dtype": name, "rows": made.num_rows, "columns": made.num_columns}
    head = json.dumps({**about, "checksums": checksums}).encode()
    sums = []
    with new_file(path, _size(made)) as file:
        file.write(head.ljust(BLOCK_BYTES, b"\0"))
        with read_in_order(table.values):
            for groups in _groups(table, made):
                file.write(groups.data)
                if checksums:
                    sums.append(block_sums(groups.reshape(-1).view(np.uint64), BLOCK_BYTES // 8))
        for each in sums:
            file.write(each.data)
    return made


def load_rows(instead_of: Path, memory: int | str | None) -> Tensor | None:
    """Return what ``x.rows`` beside an ``x.npy`` that is not there holds, or what stands for it; None: there is none.

    Args:
        instead_of: The ``.npy`` file.
        memory: That of the DataModule which is to read it from disk; None: it is read into memory here.

    Raises:
        ValueError: It is damaged, or there is less memory free than it takes.
    """
    path = instead_of.with_suffix(".rows")
    if os.path.lexists(instead_of) or not os.path.lexists(path):
        return None
    file = RowFile.open(path)
    return file.read() if memory is None else file.stand_in()


def _layout(path: str, dtype: torch.dtype, rows: int, columns: int, checksums: bool) -> RowFile:
    if rows < 0 or columns < 1:
        raise ValueError(f"features must have the shape [num_nodes, num_features], not {[rows, columns]}")
    made = RowFile(path, dtype, rows, columns, BLOCK_BYTES, 1, BLOCK_BYTES)
    per_group = max(1, BLOCK_BYTES // made.row_bytes)
    group_bytes = math.ceil(per_group * made.row_bytes / BLOCK_BYTES) * BLOCK_BYTES
    made = replace(made, rows_per_group=per_group, group_bytes=group_bytes)
    return replace(made, checksums_at=BLOCK_BYTES + made.num_blocks * BLOCK_BYTES) if checksums else made


def _size(made: RowFile) -> int:
    return BLOCK_BYTES + made.num_blocks * BLOCK_BYTES + 4 * made.num_blocks * bool(made.checksums_at)


def _groups(table: FeatureTable, made: RowFile) -> Iterator[npt.NDArray[np.uint8]]:
    """Give the groups of the file, uint8 ``[n, group_bytes]``, some at once."""
    per, width = made.rows_per_group, made.row_bytes
    step = max(1, min(_WRITTEN_AT_ONCE, (1 << 24) // made.group_bytes)) * per
    for first in range(0, table.num_nodes, step):
        rows = table.values[first : first + step]
        if made.dtype == torch.int8:
            own = None if table.scales is None else table.scales[first : first + step]
            if own is None:
                check_finite_rows(rows, rows=torch.arange(first, first + rows.size(0)))
            part = FeatureTable(rows, scales=own).quantized()
            assert part.scales is not None
            raw = np.concatenate(
                [part.scales.numpy().view(np.uint8).reshape(-1, 4), part.values.numpy().view(np.uint8)], axis=1
            )
        else:
            raw = rows.to(made.dtype).contiguous().view(torch.uint8).numpy()
        groups = np.zeros((-(-raw.shape[0] // per), made.group_bytes), np.uint8)
        count = groups.shape[0] * per
        if count > raw.shape[0]:
            raw = np.concatenate([raw, np.zeros((count - raw.shape[0], width), np.uint8)])
        groups[:, : per * width] = raw.reshape(-1, per * width)
        yield groups


@numba.njit(nogil=True, cache=True)
def block_sums(words: npt.NDArray[np.uint64], per_block: int) -> npt.NDArray[np.uint32]:
    """Return a checksum of each block: each step is invertible, so that no change of a single word goes unseen.

    Args:
        words: uint64 ``[blocks * per_block]``.
        per_block: Words of a block.
    """
    sums = np.empty(words.size // per_block, np.uint32)
    for block in range(sums.size):
        state = np.uint64(0x9E3779B97F4A7C15)
        for at in range(block * per_block, (block + 1) * per_block):
            state = (state ^ words[at]) * np.uint64(0xD6E8FEB86659FD93)
            state ^= state >> np.uint64(32)
        sums[block] = np.uint32(state & np.uint64(0xFFFFFFFF))
    return sums

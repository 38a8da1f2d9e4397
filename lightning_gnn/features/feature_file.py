"""Features as rows of a ``.npy`` file, read from disk without mapping it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.features.arrays import check_file, load_array
from lightning_gnn.features.table import FEATURE_DTYPES
from lightning_gnn.runtime.mapped_files import MappedFiles
from lightning_gnn.runtime.urls import cached_path

BLOCK_BYTES = 4096  # minimum size and alignment of direct reads


@dataclass(frozen=True)
class FeatureFile:
    """Dtype, shape and byte offset of the contiguous rows in a ``.npy`` file."""

    path: str
    dtype: torch.dtype  # float32, float16 or bfloat16
    num_rows: int
    num_columns: int  # features per row
    offset: int  # position of the first row, in bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.num_columns * self.dtype.itemsize

    @classmethod
    def open(cls, path: str | Path) -> FeatureFile:
        """Read the header of a ``.npy`` file."""
        path = cached_path(path)
        check_file(path)
        values = load_array(path)
        if values.dtype not in FEATURE_DTYPES:
            raise TypeError(f"{path}: features must be float32, float16 or bfloat16, but are {values.dtype}")
        if values.dim() != 2 or not values.numel() or not values.is_contiguous():
            shape = f"{list(values.shape)}{'' if values.is_contiguous() else ', column-major'}"
            raise ValueError(f"{path}: features must be row-major [num_nodes, num_features], but are {shape}")
        rows, columns = (int(length) for length in values.shape)
        return cls(str(path), values.dtype, rows, columns, path.stat().st_size - values.nbytes)

    @classmethod
    def behind(cls, values: Tensor) -> FeatureFile | None:
        """Return the file behind a memory-mapped table ``[num_nodes, num_features]``; None if it is not mapped."""
        if values.dtype not in FEATURE_DTYPES or values.dim() != 2 or not values.is_contiguous():
            return None
        if (mapped := MappedFiles().find(values)) is None:
            return None
        offset = mapped.offset + values.storage_offset() * values.element_size()
        rows, columns = (int(length) for length in values.shape)
        return cls(mapped.path, values.dtype, rows, columns, int(offset))

    def read_some(self, ids: Tensor) -> Tensor:
        """Return the rows ``ids``, int64 ``[n]``, as ``[n, num_columns]``, with one read per row."""
        raw = np.empty((ids.numel(), self.row_bytes), np.uint8)
        with open(self.path, "rb", buffering=0) as file:
            for i, row in enumerate(ids.tolist()):
                file.seek(self.offset + row * self.row_bytes)
                if file.readinto(raw[i].data) != self.row_bytes:
                    raise ValueError(f"{self.path} ends before row {row}: it is truncated; write it again")
        return torch.from_numpy(raw).view(self.dtype)

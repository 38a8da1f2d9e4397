"""The features of the nodes, one row each, wherever they lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.graph.buffers import pool
from lightning_gnn.graph.csc import load_array


class FeatureTable:
    """Node features in host memory or memory-mapped from a file.

    Args:
        values: float32 or float16 ``[num_nodes, num_features]``.
        check_finite: Look for NaN and infinite values, one pass over the table.

    Raises:
        TypeError: Another dtype.
        ValueError: Another number of dimensions, or a value that is not finite.
    """

    def __init__(self, values: Tensor, check_finite: bool = False) -> None:
        if not isinstance(values, Tensor) or values.dtype not in (torch.float32, torch.float16):
            kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(f"features must be float32 or float16, but are {kind}")
        if values.dim() != 2:
            raise ValueError(f"features must have the shape [num_nodes, num_features], but have {list(values.shape)}")
        if check_finite:
            check_finite_rows(values)
        self.values = values

    @property
    def num_nodes(self) -> int:
        """Number of rows."""
        return self.values.size(0)

    @property
    def num_features(self) -> int:
        """Number of columns."""
        return self.values.size(1)

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float16."""
        return self.values.dtype

    def gather(self, n_id: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy the rows of some nodes.

        Args:
            n_id: Node ids, int64 ``[n]``.
            out: Where to write, ``[n, num_features]`` of the table's dtype; by default a buffer from the pool.

        Raises:
            IndexError: A node id is out of range.
            TypeError: Wrong dtype of ``n_id`` or ``out``.
            ValueError: Wrong shape of ``out``.
        """
        if out is None:
            out = pool.empty((n_id.numel(), self.num_features), self.dtype)
        torch.ops.lightning_gnn.gather_rows(self.values, n_id, out)
        return out

    def pin_memory(self) -> FeatureTable:
        """Return a copy in page-locked host memory, which an accelerator can read directly."""
        return FeatureTable(self.values.pin_memory())

    def share_memory_(self) -> FeatureTable:
        """Move the table into shared memory; returns self."""
        self.values.share_memory_()
        return self

    def save(self, path: str | Path) -> Path:
        """Write the table as one ``.npy`` file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, self.values.numpy(), allow_pickle=False)
        return path

    @classmethod
    def load(cls, path: str | Path, mmap: bool = True) -> FeatureTable:
        """Read a ``.npy`` file; with ``mmap`` its rows stay on disk until they are gathered.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is truncated or holds no numbers.
        """
        return cls(load_array(path, mmap))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_nodes={self.num_nodes}, num_features={self.num_features}, {self.dtype})"


def check_finite_rows(values: Tensor, name: str = "x", block: int = 1 << 16) -> None:
    """Look for NaN and infinite features, block by block so that a memory-mapped table never comes in whole.

    Args:
        values: Floating point ``[num_nodes, ...]``.
        name: What to call it in the message.
        block: Rows per block.

    Raises:
        ValueError: Names the first node with such a value.
    """
    for start in range(0, values.size(0), block):
        rows = values[start : start + block]
        if not bool(torch.isfinite(rows).all()):
            bad = (~torch.isfinite(rows.reshape(rows.size(0), -1))).any(dim=1).nonzero()[0]
            raise ValueError(f"{name} of node {start + int(bad)} holds NaN or infinity; clean the features first")

"""Feature tables in host memory, on a device, or memory-mapped, optionally quantized or cached."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn.features.arrays import expect_scattered_reads, load_array, read_in_order, save_arrays
from lightning_gnn.features.hot_cache import RowCache
from lightning_gnn.features.memory_pool import pool
from lightning_gnn.features.pinned_memory import pin_host_memory
from lightning_gnn.runtime.urls import local_path

FEATURE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of unquantized tables
GraphT = TypeVar("GraphT", Data, HeteroData)
_ROWS_PER_BLOCK = 1 << 16
_MAX_SHOWN_ROWS = 5  # rows with NaN or infinity that an error message lists


class FeatureTable:
    """Node features in host memory, on a device, or memory-mapped from a file, with an optional cache of hot rows.

    Float16 and bfloat16 tables take half the memory and bandwidth. Int8 tables are quantized symmetrically by row: a
    feature is its int8 value times the scale of its row.

    Args:
        values: float32, float16 or bfloat16 ``[num_nodes, num_features]``, or int8 with ``scales``.
        check_finite: Check for NaN and infinity, in one pass over the table.
        scales: Row scales of an int8 table, float32 ``[num_nodes]``, else None.
        cache: Copies of hot rows, read instead of those in ``values``; see :meth:`cached`.
        dtype: Stored dtype, float32, float16 or bfloat16. ``values`` of another dtype are converted once, in memory.

    Raises:
        TypeError, ValueError: A dtype or shape is invalid, int8 ``values`` lack ``scales``, or a value is not finite.

    Examples:
        >>> import torch
        >>> from lightning_gnn import FeatureTable
        >>> table = FeatureTable(torch.tensor([[0.5, 1.0], [2.0, -2.0], [0.0, 127.0]]))
        >>> table.gather(torch.tensor([2, 0]))
        tensor([[  0.0000, 127.0000],
                [  0.5000,   1.0000]])
        >>> FeatureTable(table.values, dtype=torch.bfloat16).gather(torch.tensor([0]))
        tensor([[0.5000, 1.0000]], dtype=torch.bfloat16)
        >>> table.quantized()
        FeatureTable(num_nodes=3, num_features=2, torch.int8)
        >>> table.cached(torch.tensor([2]), "cpu")  # node 2 is read often
        FeatureTable(num_nodes=3, num_features=2, torch.float32, cache_rows=1)
    """

    def __init__(
        self,
        values: Tensor,
        check_finite: bool = False,
        scales: Tensor | None = None,
        cache: RowCache | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # Check the dtype: floating-point, or int8 with scales.
        kind = str(values.dtype) if isinstance(values, Tensor) else type(values).__name__
        quantized = kind == "torch.int8" and scales is not None
        if not quantized and (not isinstance(values, Tensor) or values.dtype not in FEATURE_DTYPES):
            hint = " without scales; use FeatureTable.quantized() to create both" if kind == "torch.int8" else ""
            raise TypeError(f"features must be float32, float16 or bfloat16, but are {kind}{hint}")
        if dtype is not None and (quantized or dtype not in FEATURE_DTYPES):
            raise TypeError(f"{kind} features cannot be stored as {dtype}; use float32, float16 or bfloat16 for both")
        if values.dim() != 2:
            raise ValueError(f"features must have the shape [num_nodes, num_features], but have {list(values.shape)}")
        if scales is not None:
            if not quantized or scales.dtype != torch.float32:
                raise TypeError(f"scales must be float32, for int8 features, but are {scales.dtype} for {values.dtype}")
            if list(scales.shape) != [values.size(0)]:
                raise ValueError(f"scales must have the shape [{values.size(0)}], but have {list(scales.shape)}")
        # Quantized rows are finite if their scales are.
        if check_finite:
            check_finite_rows(values if scales is None else scales)
        self.values = values if dtype is None else in_dtype(values, dtype)
        self.scales = scales
        self.cache = cache

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
        """Default dtype of :meth:`gather`: the stored dtype, or float32 for int8 tables."""
        return self.values.dtype if self.scales is None else torch.float32

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row, without its scale."""
        return self.num_features * self.values.element_size()

    @property
    def cache_rows(self) -> int:
        """Number of rows in the cache."""
        return 0 if self.cache is None else self.cache.rows.size(0)

    def gather(self, n_id: Tensor, out: Tensor | None = None, check: bool = False) -> Tensor:
        """Copy the rows of some nodes to the device of ``n_id``.

        Args:
            n_id: Node ids, int64 or int32 ``[n]``. For ids on an accelerator, the table must be there or pinned.
            out: Output, ``[n, num_features]`` of the table's dtype, float32 for 16-bit tables, or float16 for int8
                tables; by default a buffer from the pool, or new device memory.
            check: Also check ids on an accelerator, which synchronizes; otherwise, invalid ids give rows of NaN there.

        Raises:
            IndexError: A node id is out of range.
            TypeError, ValueError: ``n_id`` or ``out`` is invalid, or the accelerator cannot read the table.
        """
        if out is None:
            shape = (n_id.numel(), self.num_features)
            on_host = n_id.is_cpu
            out = pool.empty(shape, self.dtype) if on_host else torch.empty(shape, dtype=self.dtype, device=n_id.device)
        slot, rows = (None, None) if self.cache is None else (self.cache.slot, self.cache.rows)
        torch.ops.lightning_gnn.gather_rows(self.values, n_id, out, self.scales, slot, rows, check)
        return out

    def quantized(self) -> FeatureTable:
        """Return an int8 copy of the table without the cache; its size is a quarter (of 16-bit tables, half).

        The scale of a row is its largest absolute value divided by 127. The error of a feature is at most half the
        scale, plus float32 rounding (3e-5 of the scale).
        """
        if self.scales is not None:
            return FeatureTable(self.values, scales=self.scales)
        check_finite_rows(self.values)
        values = torch.empty(self.values.shape, dtype=torch.int8)
        scales = torch.empty(self.num_nodes)
        with read_in_order(self.values):
            for start in range(0, self.num_nodes, _ROWS_PER_BLOCK):
                rows = self.values[start : start + _ROWS_PER_BLOCK].to("cpu", torch.float32)
                largest = rows.abs().amax(dim=1) if self.num_features else torch.zeros(rows.size(0))
                # A subnormal scale would lose bits. Rows of zeros get the smallest normal scale, and remain zeros.
                scale = (largest / 127).clamp_(min=torch.finfo(torch.float32).tiny)
                values[start : start + _ROWS_PER_BLOCK] = (rows / scale[:, None]).round_().clamp_(-127, 127)
                scales[start : start + _ROWS_PER_BLOCK] = scale
        return FeatureTable(values, scales=scales)

    def cached(self, nodes: Tensor, device: torch.device | str) -> FeatureTable:
        """Return the table with some rows, and all scales, copied to a device.

        For an accelerator, the table must also be pinned (:meth:`pin_memory`), so that it can read the other rows.

        Args:
            nodes: Nodes whose rows are cached, unique int64 or int32 ``[cache_rows]``, such as
                ``top_accessed(graph.out_degrees, cache_rows)``.
        """
        scales = None if self.scales is None else self.scales.to(device)
        return FeatureTable(self.values, scales=scales, cache=RowCache.build(self.values, nodes, device))

    def to(self, device: torch.device | str) -> FeatureTable:
        """Return a copy on a device, without the cache."""
        return FeatureTable(self.values.to(device), scales=None if self.scales is None else self.scales.to(device))

    def pin_memory(self) -> FeatureTable:
        """Return the table in page-locked host memory, in place if possible, for accelerators to read."""
        scales = None if self.scales is None else pin_host_memory(self.scales)
        return FeatureTable(pin_host_memory(self.values), scales=scales, cache=self.cache)

    def save(self, path: str | Path) -> Path:
        """Write one ``.npy`` file (bfloat16 as ``V2``) and return its path; scales go to a second ``.scales.npy`` file.

        Raises:
            OSError: The disk is full or cannot be written to. An existing file is then unchanged.
        """
        path = local_path(path)
        name = path.stem if path.suffix == ".npy" else path.name
        save_arrays(path.parent, {name: self.values, f"{name}.scales": self.scales})
        return path.with_name(f"{name}.npy")

    @classmethod
    def load(cls, path: str | Path, mmap: bool = True) -> FeatureTable:
        """Load a table written by :meth:`save`; with ``mmap``, rows stay on disk until they are gathered.

        Raises:
            OSError, MemoryError: The file is missing or cannot be read.
            TypeError, ValueError: The file does not contain features, or is truncated.
        """
        path = Path(path)
        values = load_array(path, mmap)
        scales_path = path.with_name(f"{path.stem}.scales.npy")
        scales = load_array(scales_path, mmap=False) if values.dtype == torch.int8 else None
        try:
            return cls(expect_scattered_reads(values) if mmap else values, scales=scales)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from None

    def __repr__(self) -> str:
        kind = self.dtype if self.scales is None else self.values.dtype
        cache = f", cache_rows={self.cache_rows}" if self.cache is not None else ""
        return f"{type(self).__name__}(num_nodes={self.num_nodes}, num_features={self.num_features}, {kind}{cache})"


def in_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert features in blocks, so that a memory-mapped table is never loaded completely."""
    if values.dtype == dtype or values.requires_grad:
        return values.to(dtype)
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    with read_in_order(values):
        for start in range(0, values.size(0), _ROWS_PER_BLOCK):
            out[start : start + _ROWS_PER_BLOCK] = values[start : start + _ROWS_PER_BLOCK]
    return out


def with_feature_dtype(data: GraphT, dtype: torch.dtype | str | None, check_finite: bool = True) -> GraphT:
    """Return a shallow copy of a graph with every ``x`` converted to ``dtype``; the input is not modified."""
    # Configuration files give the dtype by name.
    if dtype is None:
        return data
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if wanted not in FEATURE_DTYPES:
        raise TypeError(f"feature_dtype={dtype!r} is unknown; use 'bfloat16', 'float16' or 'float32'")
    # In a heterogeneous graph, convert the features of each node type, except trainable ones.
    if isinstance(data, HeteroData):
        data = copy.copy(data)
        stores = [store for store in data.node_stores if store.get("x") is not None]
        stores = [store for store in stores if not torch.as_tensor(store["x"]).requires_grad]
        if not stores:
            raise ValueError(f"no node type has an x to convert to {wanted}; omit feature_dtype")
        for store in stores:
            store["x"] = with_feature_dtype(Data(x=store["x"]), wanted, check_finite).x
        return data
    if data.get("x") is None:
        raise ValueError(f"data has no x to convert to {wanted}; omit feature_dtype")
    values = torch.as_tensor(data.x)
    # Trainable features must remain the tensor that the optimizer updates.
    if values.requires_grad:
        raise ValueError("data.x requires gradients, so its dtype cannot be changed; omit feature_dtype")
    # FeatureTable does not accept float64.
    if values.dtype == torch.float64:
        values = values.to(wanted)
    converted = FeatureTable(values, dtype=wanted).values
    # Only float16 can overflow in the conversion; bfloat16 has the exponent range of float32.
    if check_finite and converted is not data.x and wanted == torch.float16:
        check_finite_rows(converted, "data.x", fix="float16 ends at 65504; use feature_dtype='bfloat16'")
    data = copy.copy(data)
    data.x = converted
    return data


def check_finite_rows(
    values: Tensor,  # floating point or complex [n, ...]
    name: str = "x",
    kind: str = "node",
    fix: str = "clean them first",
    rows: Tensor | None = None,  # ids of the rows' nodes or edges, [n]; by default 0 to n - 1
    block: int = _ROWS_PER_BLOCK,
) -> None:
    """Raise a ValueError for NaN or infinity. Reads in blocks, so a memory-mapped table is never loaded completely."""
    values = values.detach()
    bad = []
    with read_in_order(values):
        for start in range(0, values.size(0) if values.numel() else 0, block):
            part = values[start : start + block]
            if part.element_size() == 1:
                part = part.float()  # torch cannot compare float8
            if part.is_complex():
                part = torch.view_as_real(part)
            # aminmax propagates NaN and infinity in one pass; isfinite would also write and read a mask.
            if not bool(torch.stack(torch.aminmax(part)).isfinite().all()):
                bad.append((~part.reshape(part.size(0), -1).isfinite()).any(dim=1).nonzero().view(-1).cpu() + start)
    if not bad:
        return
    wrong = torch.cat(bad) if rows is None else rows.cpu()[torch.cat(bad)]
    shown = ", ".join(map(str, wrong[:_MAX_SHOWN_ROWS].tolist())) + (", …" if wrong.numel() > _MAX_SHOWN_ROWS else "")
    ids = f"{kind} {shown}" if wrong.numel() == 1 else f"{kind}s {shown}"
    raise ValueError(f"{name} holds NaN or infinity in {wrong.numel()} of {values.size(0)} rows ({ids}); {fix}")

"""The features of the nodes, one row each, wherever they lie."""

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

FEATURE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # what a table keeps features in
GraphT = TypeVar("GraphT", Data, HeteroData)
_BLOCK = 1 << 16
_NAMED = 5  # rows with NaN that a message names


class FeatureTable:
    """Node features in host memory, on a device, or memory-mapped from a file, with or without a cache of hot rows.

    Tables of bfloat16 and float16 take half of the memory, and of the time to read it. Int8 tables are symmetrically
    quantized by row: a feature is its value times the scale of its row.

    Args:
        values: float32, float16 or bfloat16 ``[num_nodes, num_features]``, or int8 with ``scales``.
        check_finite: Look for NaN and infinite values, one pass over the table.
        scales: float32 ``[num_nodes]`` of an int8 table, else None.
        cache: Hot rows that are read from elsewhere; see :meth:`cached`.
        dtype: What to keep, float32, float16 or bfloat16; ``values`` of another one are converted once, in memory.

    Raises:
        TypeError, ValueError: Another dtype or shape, int8 without ``scales``, or a value that is not finite.

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
            hint = " without scales; FeatureTable.quantized() makes both" if kind == "torch.int8" else ""
            raise TypeError(f"features must be float32, float16 or bfloat16, but are {kind}{hint}")
        if dtype is not None and (quantized or dtype not in FEATURE_DTYPES):
            raise TypeError(f"{kind} features cannot be kept as {dtype}; give float32, float16 or bfloat16 for both")
        # Check the shapes: a row for each node, and a scale for each row.
        if values.dim() != 2:
            raise ValueError(f"features must have the shape [num_nodes, num_features], but have {list(values.shape)}")
        if scales is not None:
            if not quantized or scales.dtype != torch.float32:
                raise TypeError(f"float32 scales belong to int8 features, but got {scales.dtype} for {values.dtype}")
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
        """What :meth:`gather` returns: what is kept; float32 for int8 tables."""
        return self.values.dtype if self.scales is None else torch.float32

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row, its scale left out."""
        return self.num_features * self.values.element_size()

    @property
    def cache_rows(self) -> int:
        """Number of rows in the cache."""
        return 0 if self.cache is None else self.cache.rows.size(0)

    def gather(self, n_id: Tensor, out: Tensor | None = None, check: bool = False) -> Tensor:
        """Copy the rows of some nodes to where ``n_id`` is.

        Args:
            n_id: Node ids, int64 or int32 ``[n]``. On an accelerator, the table must be there too, or in pinned memory.
            out: Where to write, ``[n, num_features]`` of the table's dtype, or float32 for 16 bits, or float16 for an
                int8 table; by default a buffer from the pool, or new device memory.
            check: Check the ids on an accelerator too, which waits for it; else rows out of range come out as NaN.

        Raises:
            IndexError: A node id is out of range.
            TypeError, ValueError: ``n_id`` or ``out`` do not fit, or memory that the accelerator cannot read.
        """
        if out is None:
            shape = (n_id.numel(), self.num_features)
            on_host = n_id.is_cpu
            out = pool.empty(shape, self.dtype) if on_host else torch.empty(shape, dtype=self.dtype, device=n_id.device)
        slot, rows = (None, None) if self.cache is None else (self.cache.slot, self.cache.rows)
        torch.ops.lightning_gnn.gather_rows(self.values, n_id, out, self.scales, slot, rows, check)
        return out

    def quantized(self) -> FeatureTable:
        """Return an int8 copy of the table, a quarter (of 16 bits, half) of its size; without the cache.

        The scale of a row is its largest absolute value over 127, the error of a feature at most half of that, beside
        the rounding of float32 (a further 3e-5 of the scale).
        """
        if self.scales is not None:
            return FeatureTable(self.values, scales=self.scales)
        check_finite_rows(self.values)
        values = torch.empty(self.values.shape, dtype=torch.int8)
        scales = torch.empty(self.num_nodes)
        with read_in_order(self.values):
            for start in range(0, self.num_nodes, _BLOCK):
                rows = self.values[start : start + _BLOCK].to("cpu", torch.float32)
                largest = rows.abs().amax(dim=1) if self.num_features else torch.zeros(rows.size(0))
                # A scale below the normal numbers would lose bits; rows of zeros get one too, and stay zeros.
                scale = (largest / 127).clamp_(min=torch.finfo(torch.float32).tiny)
                values[start : start + _BLOCK] = (rows / scale[:, None]).round_().clamp_(-127, 127)
                scales[start : start + _BLOCK] = scale
        return FeatureTable(values, scales=scales)

    def cached(self, nodes: Tensor, device: torch.device | str) -> FeatureTable:
        """Return the table with some nodes' rows, and all scales, copied to a device; for an accelerator, pin it too.

        Args:
            nodes: Whose rows, int64 or int32 ``[cache_rows]``, none of them twice, such as
                ``top_accessed(graph.out_degrees, cache_rows)``.
        """
        scales = None if self.scales is None else self.scales.to(device)
        return FeatureTable(self.values, scales=scales, cache=RowCache.build(self.values, nodes, device))

    def to(self, device: torch.device | str) -> FeatureTable:
        """Return a copy on a device, without the cache."""
        return FeatureTable(self.values.to(device), scales=None if self.scales is None else self.scales.to(device))

    def pin_memory(self) -> FeatureTable:
        """Return the table in page-locked host memory, the same where the system can lock it, for accelerators."""
        scales = None if self.scales is None else pin_host_memory(self.scales)
        return FeatureTable(pin_host_memory(self.values), scales=scales, cache=self.cache)

    def save(self, path: str | Path) -> Path:
        """Write one ``.npy`` file (bfloat16 as ``V2``) and return its path; an int8 table's scales go beside it.

        Raises:
            OSError: The disk has no room for it, or cannot be written to; what was there before is still there.
        """
        path = Path(path)
        name = path.stem if path.suffix == ".npy" else path.name
        save_arrays(path.parent, {name: self.values, f"{name}.scales": self.scales})
        return path.with_name(f"{name}.npy")

    @classmethod
    def load(cls, path: str | Path, mmap: bool = True) -> FeatureTable:
        """Read what :meth:`save` wrote; with ``mmap`` the rows stay on disk until they are gathered.

        Raises:
            OSError, MemoryError: The file is missing or cannot be read.
            TypeError, ValueError: The file holds no features, or is truncated.
        """
        path = Path(path)
        values = load_array(path, mmap)
        beside = path.with_name(f"{path.stem}.scales.npy")
        scales = load_array(beside, mmap=False) if values.dtype == torch.int8 else None
        try:
            return cls(expect_scattered_reads(values) if mmap else values, scales=scales)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from None

    def __repr__(self) -> str:
        kind = self.dtype if self.scales is None else self.values.dtype
        cache = f", cache_rows={self.cache_rows}" if self.cache is not None else ""
        return f"{type(self).__name__}(num_nodes={self.num_nodes}, num_features={self.num_features}, {kind}{cache})"


def in_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return features in another dtype, converted block by block so that a memory-mapped table never comes in whole."""
    if values.dtype == dtype or values.requires_grad:
        return values.to(dtype)
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    with read_in_order(values):
        for start in range(0, values.size(0), _BLOCK):
            out[start : start + _BLOCK] = values[start : start + _BLOCK]
    return out


def with_feature_dtype(data: GraphT, dtype: torch.dtype | str | None, check_finite: bool = True) -> GraphT:
    """Return a graph with each ``x`` in another dtype, or its name; the user's own graph stays as it is."""
    # Dtypes may be given by name, as in configuration files.
    if dtype is None:
        return data
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if wanted not in FEATURE_DTYPES:
        raise TypeError(f"feature_dtype={dtype!r} is unknown; use 'bfloat16', 'float16' or 'float32'")
    # With types, convert the features of each type, apart from those that are trained.
    if isinstance(data, HeteroData):
        data = copy.copy(data)
        stores = [store for store in data.node_stores if store.get("x") is not None]
        stores = [store for store in stores if not torch.as_tensor(store["x"]).requires_grad]
        if not stores:
            raise ValueError(f"no type has an x to keep as {wanted}; leave feature_dtype out")
        for store in stores:
            store["x"] = with_feature_dtype(Data(x=store["x"]), wanted, check_finite).x
        return data
    if data.get("x") is None:
        raise ValueError(f"data has no x to keep as {wanted}; leave feature_dtype out")
    values = torch.as_tensor(data.x)
    # Features that are trained must remain the tensor that the optimizer updates.
    if values.requires_grad:
        raise ValueError("data.x is trained, and so is read as it is; leave feature_dtype out")
    # Tables do not take float64, so it is converted beforehand.
    if values.dtype == torch.float64:
        values = values.to(wanted)
    kept = FeatureTable(values, dtype=wanted).values
    # Only float16 can overflow in the conversion; the other dtypes have float32's range of exponents.
    if check_finite and kept is not data.x and wanted == torch.float16:
        check_finite_rows(kept, "data.x", fix="as float16 numbers end at 65504; use feature_dtype='bfloat16'")
    # The user's graph keeps its own features.
    data = copy.copy(data)
    data.x = kept
    return data


def check_finite_rows(
    values: Tensor,  # floating point or complex [n, ...]
    name: str = "x",
    kind: str = "node",
    fix: str = "clean them first",
    rows: Tensor | None = None,  # which nodes or edges the rows are, [n]; by default the first ones
    block: int = _BLOCK,
) -> None:
    """Look for NaN and infinity in one pass, block by block so that a memory-mapped table never comes in whole."""
    values = values.detach()
    bad = []
    with read_in_order(values):
        for start in range(0, values.size(0) if values.numel() else 0, block):
            part = values[start : start + block]
            if part.element_size() == 1:
                part = part.float()  # torch compares no float8
            if part.is_complex():
                part = torch.view_as_real(part)
            # NaN and infinity come through: one read, where isfinite writes a result per value and reads that.
            if not bool(torch.stack(torch.aminmax(part)).isfinite().all()):
                bad.append((~part.reshape(part.size(0), -1).isfinite()).any(dim=1).nonzero().view(-1).cpu() + start)
    if not bad:
        return
    found = torch.cat(bad) if rows is None else rows.cpu()[torch.cat(bad)]
    first = ", ".join(str(row) for row in found[:_NAMED].tolist()) + (", …" if found.numel() > _NAMED else "")
    ids = f"{kind} {first}" if found.numel() == 1 else f"{kind}s {first}"
    raise ValueError(f"{name} holds NaN or infinity in {found.numel()} of {values.size(0)} rows ({ids}); {fix}")

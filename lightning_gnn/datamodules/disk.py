"""Features of a DataModule that stay on disk, and the split of their memory budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from lightning_gnn.features.arrays import advise, expect_scattered_reads, load_array
from lightning_gnn.features.disk_features import MOST_READS, DiskFeatures
from lightning_gnn.features.feature_file import FeatureFile
from lightning_gnn.graph.stores import AttributeName
from lightning_gnn.loading.batch import Batch, BatchTask
from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.loading.prefetch.lookahead import CompactSampledBatch
from lightning_gnn.runtime.messages import memory_bytes, shown, whole_number

Store: TypeAlias = str | Path | Mapping[str, str | Path] | None  # one .npy file, or one per node type
_WINDOW_DIVISOR = 8  # by default, mini-batches sampled ahead use an eighth of the memory
_BATCH_SIZE_MARGIN = 1.25  # safety factor on the size of the measured mini-batch
_DEFAULT_BATCH_SIZE = 1024
_MAX_COMPARED_ROWS = 258  # rows of a file that are compared with the graph's, evenly spaced


class DiskFeatureConfig:
    """Files, memory and lookahead of a graph's features on disk; see :class:`StorageOptions`."""

    def __init__(self, data: Batch, memory: int | str, lookahead: int | str | None = None, store: Store = None) -> None:
        self.memory = memory_bytes(memory, "memory")
        self.lookahead: int | tuple[int, int]  # this argument of loaders
        if lookahead is None:
            self.lookahead = MOST_READS - 1, self.memory // _WINDOW_DIVISOR
        elif isinstance(lookahead, str):
            self.lookahead = MOST_READS - 1, memory_bytes(lookahead, "lookahead")
        else:
            self.lookahead = min(whole_number(lookahead, "lookahead", 0), MOST_READS - 1)
        self.files = _find_feature_files(data, store)
        self._tables: dict[AttributeName, DiskFeatures] | None = None
        self._memory_split = 0, 0

    def add_mapped_features(self, data: Batch) -> Batch:
        """Return the graph with ``x`` mapped from its file wherever the graph lacks it."""
        stores = {name: data if name == "x" else data[name[0]] for name in self.files}
        if all(store.get("x") is not None for store in stores.values()):
            return data
        data = copy.copy(data)
        for name, file in self.files.items():
            store = data if name == "x" else data[name[0]]
            if store.get("x") is None:
                store.x = expect_scattered_reads(load_array(file.path))
        return data

    def tables(self, loader: Callable[[], PipelineLoader]) -> dict[AttributeName, DiskFeatures]:
        """Return the tables, created once; they divide the memory in proportion to their sizes on disk."""
        if self._tables is None:
            sample_loader = loader()
            rows, waiting = _measure_batch(sample_loader, self.files)
            ready = max(sample_loader.num_ahead, 1) + 2
            ahead = self.lookahead
            window = ahead[1] if isinstance(ahead, tuple) else min(ahead * waiting, self.memory)
            batches = int(
                _BATCH_SIZE_MARGIN * ready * sum(rows[name] * file.row_bytes for name, file in self.files.items())
            )
            least = {name: DiskFeatures.least_bytes(file) for name, file in self.files.items()}
            if (left := self.memory - window - batches - sum(least.values())) < 0:
                raise ValueError(
                    f"memory={shown(self.memory)} is too small: {ready} mini-batches, ready or in training, need "
                    f"{shown(batches)}, those sampled ahead {shown(window)}, and reading from disk at least "
                    f"{shown(sum(least.values()))}; increase memory, or reduce lookahead, num_workers or batch_size"
                )
            sizes = {name: file.num_rows * DiskFeatures.slot_bytes(file) for name, file in self.files.items()}
            self._memory_split = window, batches
            self._tables = {
                name: DiskFeatures(file, least[name] + left * sizes[name] // sum(sizes.values()))
                for name, file in self.files.items()
            }
        return self._tables

    def __str__(self) -> str:
        files = "; ".join(
            f"{Path(file.path).name}, {shown(file.num_rows * file.row_bytes)}" for file in self.files.values()
        )
        if self._tables is None:
            return f"features on disk ({files}), read with {shown(self.memory)} of memory"
        cached = sum(table.cache_rows * table.row_bytes for table in self._tables.values())
        fraction = cached / sum(file.num_rows * file.row_bytes for file in self.files.values())
        window, batches = self._memory_split
        return (
            f"features on disk ({files}); of {shown(self.memory)} of memory, {shown(cached)} cache {fraction:.0%} of "
            f"them, {shown(window)} are for mini-batches sampled ahead, {shown(batches)} for those that are ready"
        )


def _find_feature_files(data: Batch, store: Any) -> dict[AttributeName, FeatureFile]:
    """Return the feature files by attribute: those of ``store``, else the files that ``x`` is mapped from."""
    is_hetero = isinstance(data, HeteroData)
    # Files of the store replace the graph's features.
    if store is not None:
        if is_hetero != isinstance(store, Mapping):
            graph, expected = ("heterogeneous", "one file per node type") if is_hetero else ("homogeneous", "one file")
            raise TypeError(f"store={store!r}: a {graph} graph requires {expected}")
        if is_hetero and (unknown := [node_type for node_type in store if node_type not in data.node_types]):
            raise ValueError(f"store: no such node type: {unknown[0]!r}; use {', '.join(data.node_types)}")
        paths: dict[Any, Any] = {(key, "x"): path for key, path in store.items()} if is_hetero else {"x": store}
        files = {name: FeatureFile.open(path) for name, path in paths.items()}
    else:
        # Without a store, only memory-mapped tensors can be read from disk.
        stores = {(key, "x"): data[key] for key in data.node_types} if is_hetero else {"x": data}
        features = {name: part.get("x") for name, part in stores.items()}
        fixed = {name: x for name, x in features.items() if isinstance(x, Tensor) and not x.requires_grad}
        files = {name: file for name, x in fixed.items() if (file := FeatureFile.behind(x)) is not None}
        if not files:
            raise ValueError(
                "memory= reads features from disk, but data.x is not mapped from a file of a megabyte or more: load "
                "the folder with load_folder, or set store= to a .npy file"
            )
    # Check that each file matches its nodes and the features in memory.
    for name, file in files.items():
        part, where = (data, "data") if name == "x" else (data[name[0]], f"data[{name[0]!r}]")
        if part.num_nodes != file.num_rows:
            raise ValueError(f"{file.path} has {file.num_rows} rows, but {where} has {part.num_nodes} nodes")
        x = part.get("x")
        if isinstance(x, Tensor) and (x.requires_grad or x.size(-1) != file.num_columns):
            if x.requires_grad:
                problem = "requires gradients"
            else:
                problem = f"has {x.size(-1)} features and the file {file.num_columns}"
            raise ValueError(f"{where}.x {problem}, so {file.path} cannot replace it")
        if store is not None and isinstance(x, Tensor):
            _compare_rows(file, x, where)
    return files


def _compare_rows(file: FeatureFile, x: Tensor, where: str) -> None:
    """Raise a ValueError if some rows of a file differ from the graph's, which may have changed since."""
    mapped = FeatureFile.behind(x)
    if mapped == file:
        return
    ids = torch.linspace(0, file.num_rows - 1, min(_MAX_COMPARED_ROWS, file.num_rows), dtype=torch.float64).long()
    on_disk = file.read_some(ids)
    if mapped is not None:  # disable read-ahead, which would load megabytes per row into the page cache
        advise(x, "MADV_RANDOM")
    in_graph = x.detach()[ids.to(x.device)].cpu()
    if mapped is not None:
        advise(x, "MADV_NORMAL")
    differs = ~_is_equal(on_disk, in_graph)
    if differs.any():
        i, column = differs.nonzero()[0].tolist()
        raise ValueError(
            f"{file.path} and {where}.x differ: column {column} of row {int(ids[i])} is "
            f"{on_disk[i, column].item():g} in the file and {in_graph[i, column].item():g} in {where}.x "
            f"({int(differs.any(1).sum())} of {ids.numel()} compared rows differ); write the file again from these "
            f"features, or remove {where}.x if the file is right"
        )


def _is_equal(a: Tensor, b: Tensor) -> Tensor:
    """Compare elementwise, bool ``[n, f]``, with a tolerance for the rounding of the coarser dtype."""
    eps = 0.0
    if a.dtype != b.dtype:
        floating = [torch.finfo(dtype) for dtype in (a.dtype, b.dtype) if dtype.is_floating_point]
        coarser = max(floating, key=lambda info: info.eps)
        eps, tiny = coarser.eps, coarser.tiny
    return torch.isclose(a.double(), b.double(), rtol=eps, atol=eps * tiny if eps else 0.0, equal_nan=True)


def _measure_batch(loader: PipelineLoader, files: Mapping[Any, FeatureFile]) -> tuple[dict[AttributeName, int], int]:
    """Sample a mini-batch; return its number of rows per table, and its bytes without features."""
    if loader.pipeline.requires_main_thread:  # do not run user code for a measurement
        return dict.fromkeys(files, 0), 0
    size = getattr(loader.batch_sampler, "batch_size", None) or _DEFAULT_BATCH_SIZE
    sampled = loader.pipeline.sample(BatchTask(0, 0, torch.arange(min(size, len(loader.dataset)))))
    types = {name: name[0] if isinstance(name, tuple) else None for name in files}
    return {name: sampled.nodes(key).numel() for name, key in types.items()}, CompactSampledBatch(sampled).num_bytes

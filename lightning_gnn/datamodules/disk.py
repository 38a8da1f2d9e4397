"""Which features of a DataModule stay on disk, and how one number of bytes is shared out for them."""

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

Store: TypeAlias = str | Path | Mapping[str, str | Path] | None  # .npy files, one or by type
_WINDOW_SHARE = 8  # of the memory, mini-batches that wait for their features take by default: an eighth
_MARGIN = 1.25  # how much larger than the one that was measured mini-batches are taken to be
_USUAL_BATCH = 1024
_COMPARED = 258  # rows of a given file that are compared with those in the graph: first, last, some evenly between


class DiskFeatureConfig:
    """Where ``x`` of a graph is read from, with how much memory; options of :class:`StorageOptions`."""

    def __init__(
        self,
        data: Batch,
        memory: int | str,
        lookahead: int | str | None = None,
        store: Store = None,
    ) -> None:
        self.memory = memory_bytes(memory, "memory")
        if lookahead is None:
            self.window: tuple[int, int | None] = MOST_READS - 1, self.memory // _WINDOW_SHARE
        elif isinstance(lookahead, str):
            self.window = MOST_READS - 1, memory_bytes(lookahead, "lookahead")
        else:
            self.window = min(whole_number(lookahead, "lookahead", 0), MOST_READS - 1), None
        self.files = _files(data, store)
        self._tables: dict[AttributeName, DiskFeatures] | None = None
        self._shares = 0, 0

    def added_to(self, data: Batch) -> Batch:
        """Return the graph with ``x`` for each table, mapped from its file where the graph has none."""
        parts = {name: data if name == "x" else data[name[0]] for name in self.files}
        if all(part.get("x") is not None for part in parts.values()):
            return data
        data = copy.copy(data)
        for name, file in self.files.items():
            part = data if name == "x" else data[name[0]]
            if part.get("x") is None:
                part.x = expect_scattered_reads(load_array(file.path))
        return data

    @property
    def lookahead(self) -> int | tuple[int, int]:
        """What a loader takes so that it looks ahead."""
        most, size = self.window
        return most if size is None else (most, size)

    def tables(self, loader: Callable[[], PipelineLoader]) -> dict[AttributeName, DiskFeatures]:
        """Return the tables, which share the memory in proportion to their sizes on disk; made once."""
        if self._tables is None:
            measured = loader()
            rows, waiting = _measured(measured, self.files)
            ready = max(measured.num_ahead, 1) + 2
            most, size = self.window
            window = min(most * waiting, self.memory) if size is None else size
            batches = int(_MARGIN * ready * sum(rows[name] * file.row_bytes for name, file in self.files.items()))
            least = {name: DiskFeatures.least_bytes(file) for name, file in self.files.items()}
            if (left := self.memory - window - batches - sum(least.values())) < 0:
                raise ValueError(
                    f"memory={shown(self.memory)} does not suffice: {ready} mini-batches that are ready or trained on "
                    f"take {shown(batches)}, those sampled ahead {shown(window)}, and reading from disk at least "
                    f"{shown(sum(least.values()))}; give more memory, a smaller lookahead, fewer num_workers, or "
                    "smaller mini-batches"
                )
            sizes = {name: file.num_rows * DiskFeatures.slot_bytes(file) for name, file in self.files.items()}
            self._shares = window, batches
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
        kept = sum(table.cache_rows * table.row_bytes for table in self._tables.values())
        share = kept / sum(file.num_rows * file.row_bytes for file in self.files.values())
        window, batches = self._shares
        return (
            f"features on disk ({files}); of {shown(self.memory)} of memory {shown(kept)} hold {share:.0%} of them, "
            f"{shown(window)} are for mini-batches sampled ahead, {shown(batches)} for those that are ready"
        )


def _files(data: Batch, store: Any) -> dict[AttributeName, FeatureFile]:
    """Return where ``x`` lies, by the name of the attribute as loaders have it."""
    typed = isinstance(data, HeteroData)
    # Files that the user names replace the features of the graph.
    if store is not None:
        if typed != isinstance(store, Mapping):
            wanted = "one file for each type, by its name" if typed else "one file"
            raise TypeError(f"store={store!r}: a graph {'with' if typed else 'without'} types needs {wanted}")
        if typed and (unknown := [kind for kind in store if kind not in data.node_types]):
            raise ValueError(f"store: there is no node type {unknown[0]!r}, only {', '.join(data.node_types)}")
        given: dict[Any, Any] = {(kind, "x"): path for kind, path in store.items()} if typed else {"x": store}
        found = {name: FeatureFile.open(path) for name, path in given.items()}
    else:
        # Without a store, only tensors that are mapped from a file can be read from disk.
        parts = {(kind, "x"): data[kind] for kind in data.node_types} if typed else {"x": data}
        there = {name: part.get("x") for name, part in parts.items()}
        fixed = {name: x for name, x in there.items() if isinstance(x, Tensor) and not x.requires_grad}
        found = {name: file for name, x in fixed.items() if (file := FeatureFile.behind(x)) is not None}
        if not found:
            raise ValueError(
                "memory= reads features from disk, but data.x is not mapped from a file of a megabyte or more: load "
                "the folder with load_folder, or give store=, a .npy file"
            )
    # Check that each file fits its nodes, and that nothing in memory contradicts it.
    for name, file in found.items():
        part, where = (data, "data") if name == "x" else (data[name[0]], f"data[{name[0]!r}]")
        if part.num_nodes != file.num_rows:
            raise ValueError(f"{file.path} has {file.num_rows} rows, but {where} has {part.num_nodes} nodes")
        x = part.get("x")
        if isinstance(x, Tensor) and (x.requires_grad or x.size(-1) != file.num_columns):
            why = "is trained" if x.requires_grad else f"has {x.size(-1)} features and the file {file.num_columns}"
            raise ValueError(f"{where}.x {why}, so {file.path} cannot stand for it")
        if store is not None and isinstance(x, Tensor):
            _check_same(file, x, where)
    return found


def _check_same(file: FeatureFile, x: Tensor, where: str) -> None:
    """Compare some rows of a file with those in the graph, which may have been changed after it was written."""
    behind = FeatureFile.behind(x)
    if behind == file:
        return
    ids = torch.linspace(0, file.num_rows - 1, min(_COMPARED, file.num_rows), dtype=torch.float64).long()
    there = file.read_some(ids)
    if behind is not None:  # or each row would bring megabytes into the page cache
        advise(x, "MADV_RANDOM")
    given = x.detach()[ids.to(x.device)].cpu()
    if behind is not None:
        advise(x, "MADV_NORMAL")
    wrong = ~_is_equal(there, given)
    if wrong.any():
        rows = wrong.any(1)
        place, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{file.path} holds other features than {where}.x: column {column} of row {int(ids[place])} is "
            f"{there[place, column].item():g} in the file and {given[place, column].item():g} in {where}.x (of "
            f"{ids.numel()} rows that were compared {int(rows.sum())} differ); write the file again from these "
            f"features, or leave {where}.x out where the file is right"
        )


def _is_equal(there: Tensor, given: Tensor) -> Tensor:
    """Say which numbers of a file are those given, but for what the coarser of both dtypes rounds, bool ``[n, f]``."""
    eps = 0.0
    if there.dtype != given.dtype:
        floating = [torch.finfo(dtype) for dtype in (there.dtype, given.dtype) if dtype.is_floating_point]
        coarser = max(floating, key=lambda info: info.eps)
        eps, tiny = coarser.eps, coarser.tiny
    return torch.isclose(there.double(), given.double(), rtol=eps, atol=eps * tiny if eps else 0.0, equal_nan=True)


def _measured(loader: PipelineLoader, files: Mapping[Any, FeatureFile]) -> tuple[dict[AttributeName, int], int]:
    """Sample a mini-batch; return how many rows of each table it needs, and what it takes without them."""
    if loader.pipeline.requires_main_thread:  # one's own sampler is not run for this
        return dict.fromkeys(files, 0), 0
    size = getattr(loader.batch_sampler, "batch_size", None) or _USUAL_BATCH
    sampled = loader.pipeline.sample(BatchTask(0, 0, torch.arange(min(size, len(loader.dataset)))))
    kinds = {name: name[0] if isinstance(name, tuple) else None for name in files}
    return {name: sampled.nodes(kind).numel() for name, kind in kinds.items()}, CompactSampledBatch(sampled).num_bytes

"""Graph topology in CSC format (compressed sparse columns): the in-neighbors of each node are contiguous."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData

from lightning_gnn.features.arrays import load_array, save_arrays
from lightning_gnn.features.hot_cache import CachedAdjacency
from lightning_gnn.features.pinned_memory import pin_host_memory
from lightning_gnn.graph.adjacency import coo_edges, transposed_csr
from lightning_gnn.graph.edge_attributes import count_parallel, order_by_time, ordered_times, sum_weights, valid_weights
from lightning_gnn.runtime.memory_info import total_bytes
from lightning_gnn.runtime.urls import cached_path, local_path

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class CSCGraph:
    """A directed graph, stored by target: the in-neighbors of ``v`` are ``indices[indptr[v]:indptr[v + 1]]``.

    Build it with one of the ``from_…`` constructors, which check their input; the plain constructor does not.

    Args:
        indptr: Offsets, int64 ``[num_nodes + 1]``.
        indices: Source nodes, int32 if the node ids fit, otherwise int64, ``[num_edges]``.
        edge_ids: Position of each edge in the user's ``edge_index``, int32 or int64 ``[num_edges]``, or None if both
            orders are equal.
        time: Time of each edge, ascending in each list, int64 ``[num_edges]`` (see :meth:`with_time`), or None.
        weight: Weight of each edge, float64 ``[num_edges]``, all positive (see :meth:`with_weight`), or None.
        prefix: Prefix sums of each list's weights, float64 ``[num_edges]``, or None.
        floating_time: The original times were floating-point; ``time`` contains integers in the same order.
        source_count: Number of source nodes if they have another type than the targets.

    Examples:
        >>> import torch
        >>> from lightning_gnn import CSCGraph
        >>> sources, targets = [0, 2, 1, 0], [1, 1, 2, 2]
        >>> graph = CSCGraph.from_edge_index(torch.tensor([sources, targets]))
        >>> graph
        CSCGraph(num_nodes=3, num_edges=4)
        >>> graph.indices[graph.indptr[1] : graph.indptr[2]]  # the in-neighbors of node 1
        tensor([0, 2], dtype=torch.int32)
        >>> graph.in_degrees
        tensor([0, 2, 2])
    """

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor | None = None
    time: Tensor | None = None
    weight: Tensor | None = None
    prefix: Tensor | None = None
    floating_time: bool = False
    source_count: int | None = None

    @property
    def num_nodes(self) -> int:
        """Number of target nodes; in a homogeneous graph, of all nodes."""
        return self.indptr.numel() - 1

    @property
    def num_sources(self) -> int:
        """Number of source nodes."""
        return self.num_nodes if self.source_count is None else self.source_count

    @property
    def num_edges(self) -> int:
        """Number of edges, including duplicates and self-loops."""
        return self.indices.numel()

    @property
    def is_temporal(self) -> bool:
        """Whether edges have times."""
        return self.time is not None

    @property
    def in_degrees(self) -> Tensor:
        """In-degree of each node, int64 ``[num_nodes]``."""
        return self.indptr.diff()

    @property
    def out_degrees(self) -> Tensor:
        """Out-degree of each source node, int64 ``[num_sources]``; takes one pass over the edges."""
        return torch.bincount(self.indices, minlength=self.num_sources)

    @cached_property
    def coarse_time(self) -> Tensor | None:
        """Every 16th time, int64 ``[num_edges / 16]``, for searches; None if edges have no times."""
        return None if self.time is None else self.time[::16].contiguous()

    @cached_property
    def parallel(self) -> Tensor | None:
        """Number of earlier edges in the list with the same source, int32 ``[num_edges]``; None if all are 0."""
        counts = count_parallel(self.indptr.cpu().numpy(), self.indices.cpu().numpy(), self.num_sources)
        if not counts.any():
            return None
        parallel = torch.from_numpy(counts)
        return parallel.pin_memory() if self.indices.is_pinned() else parallel.to(self.indices.device)

    @classmethod
    def from_edge_index(
        cls, edge_index: Tensor, num_nodes: int | None = None, num_sources: int | None = None
    ) -> CSCGraph:
        """Sort a COO edge list by target, preserving the order of the edges of each target.

        Args:
            edge_index: Sources and targets, int32 or int64 ``[2, num_edges]``.
            num_nodes: Number of nodes; by default one more than the largest id.
            num_sources: Number of source nodes if they have another type than the targets.

        Raises:
            TypeError: ``edge_index`` is not an integer tensor, or ``num_nodes`` is not an integer.
            ValueError: The shape is wrong, a node is outside ``[0, num_nodes)``, or its offsets exceed the memory.
        """
        check_edge_index(edge_index)
        edge_index = unwrap(edge_index).detach().cpu()
        num_nodes = _count_nodes(edge_index if num_sources is None else edge_index[1], num_nodes)
        count_of_sources = num_nodes if num_sources is None else _count_nodes(edge_index[0], num_sources)
        for side, count in enumerate((count_of_sources, num_nodes)):
            check_ids(edge_index[side], count, f"edge_index[{side}]")
        row, col = edge_index[0].numpy(), edge_index[1].numpy()
        indices: np.ndarray = np.empty(row.size, index_dtype(count_of_sources))
        edge_ids: np.ndarray = np.empty(row.size, index_dtype(row.size))
        indptr = sort_by_target(row, col, num_nodes, indices, edge_ids)
        in_order = bool((col[1:] >= col[:-1]).all())
        ids = None if in_order else torch.from_numpy(edge_ids)
        return cls(torch.from_numpy(indptr), torch.from_numpy(indices), ids, source_count=num_sources)

    @classmethod
    def from_csc(
        cls, indptr: Tensor, indices: Tensor, edge_ids: Tensor | None = None, num_sources: int | None = None
    ) -> CSCGraph:
        """Check and wrap arrays in CSC order; memory-mapped arrays stay on disk.

        Args:
            indptr: Offsets, integer ``[num_nodes + 1]``, starting at 0, ascending, ending at ``num_edges``.
            indices: Source nodes, integer ``[num_edges]``.
            edge_ids: A permutation of the user's edges, integer ``[num_edges]``, or None.
            num_sources: As for :meth:`from_edge_index`.

        Raises:
            TypeError, ValueError: A dtype is not an integer, the offsets descend, or a node is out of range.
        """
        check_csc(indptr, indices, edge_ids, indptr.numel() - 1 if num_sources is None else num_sources)
        return cls(indptr.to(torch.int64).contiguous(), indices.contiguous(), edge_ids, source_count=num_sources)

    @classmethod
    def from_data(cls, data: Data) -> CSCGraph:
        """Convert the topology of a PyG ``Data``: ``graph`` if it is a CSCGraph, otherwise ``adj_t`` or ``edge_index``.

        Raises:
            TypeError: ``data`` is not a homogeneous PyG ``Data``.
            ValueError: The topology is missing or invalid.
        """
        if not isinstance(data, Data):
            raise unexpected_graph(data, "a homogeneous torch_geometric.data.Data")
        graph = data.get("graph")
        if isinstance(graph, CSCGraph):
            return graph
        if data.get("adj_t") is not None:
            return cls.from_adj_t(data.adj_t)
        if data.get("edge_index") is None:
            raise ValueError("data has no topology to sample from: set edge_index, adj_t or graph")
        return cls.from_edge_index(data.edge_index, data.num_nodes)

    @classmethod
    def from_adj_t(cls, adj_t: object, num_sources: int | None = None) -> CSCGraph:
        """Convert a transposed adjacency matrix, ``[num_nodes, num_sources]``, without its values.

        Args:
            adj_t: A sparse CSR, CSC or COO tensor, or PyG's ``SparseTensor``. The order of the edges is that of the
                entries, for CSC that of CSR.
            num_sources: As for :meth:`from_edge_index`.

        Raises:
            TypeError, ValueError: The matrix is not sparse, or an id is out of range.
        """
        edges = coo_edges(adj_t)
        if edges is not None:
            return cls.from_edge_index(edges, adj_t.size(0), num_sources)  # type: ignore[attr-defined]
        rowptr, col, _ = transposed_csr(adj_t)
        count = rowptr.numel() - 1 if num_sources is None else num_sources
        return cls.from_csc(rowptr.cpu(), narrow(col, count).cpu(), num_sources=num_sources)

    def with_time(self, time: Tensor, floating: bool = False) -> CSCGraph:
        """Return the graph with edge times; each list is sorted by time (stable).

        Args:
            time: Integer or floating-point ``[num_edges]``, in the user's edge order.
            floating: Convert integers to floating-point, to match the times of other edges.

        Raises:
            TypeError, ValueError: The times are not one number per edge, contain NaN, or the edges have weights.
        """
        times = self._to_csc_order(ordered_times(time, "times of edges", floating), "times")
        return self._sort_by_time(times, floating or time.is_floating_point())

    def with_source_time(self, time: Tensor, floating: bool = False) -> CSCGraph:
        """Return the graph with the times ``[num_sources]`` of source nodes as edge times; see :meth:`with_time`."""
        times = ordered_times(time, "times of nodes", floating)
        if times.numel() != self.num_sources:
            raise ValueError(f"got {times.numel()} times of nodes, but the graph has {self.num_sources} nodes")
        return self._sort_by_time(times[self.indices.to(torch.int64)], floating or time.is_floating_point())

    def _sort_by_time(self, times: Tensor, floating: bool) -> CSCGraph:
        """Sort each list by times ``[num_edges]``, given in CSC order."""
        if self.weight is not None:
            raise ValueError("edges with weights cannot have times too: weighted temporal sampling is not supported")
        graph = replace(self, floating_time=floating)
        order = torch.from_numpy(order_by_time(self.indptr.numpy(), times.numpy()))
        if not order.numel():
            return replace(graph, time=times)
        ids = order if self.edge_ids is None else self.edge_ids[order]
        return replace(graph, indices=self.indices[order], edge_ids=narrow(ids, self.num_edges), time=times[order])

    def with_weight(self, weight: Tensor) -> CSCGraph:
        """Return the graph with edge weights; samplers pick edges in proportion to them.

        Edges with weight 0 can never be picked and are removed, so the graph may have fewer edges than before.
        ``weight`` is floating-point or integer ``[num_edges]``, in the user's edge order.

        Raises:
            TypeError, ValueError: The weights are not one finite number >= 0 per edge, or the edges have times.
        """
        if self.time is not None:
            raise ValueError("edges with times cannot have weights too: weighted temporal sampling is not supported")
        weights = self._to_csc_order(valid_weights(weight), "weights")
        graph = self
        if not bool((weights > 0).all()):
            positive = (weights > 0).nonzero().view(-1)
            ids = positive if self.edge_ids is None else self.edge_ids[positive]
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (weights > 0).cumsum(0)])
            graph = replace(
                self, indptr=offsets[self.indptr], indices=self.indices[positive], edge_ids=narrow(ids, self.num_edges)
            )
            weights = weights[positive]
        prefix = torch.from_numpy(sum_weights(graph.indptr.numpy(), weights.numpy()))
        return replace(graph, weight=weights, prefix=prefix)

    def _to_csc_order(self, values: Tensor, what: str) -> Tensor:
        """Permute values from the user's edge order to CSC order."""
        if values.numel() != self.num_edges:
            raise ValueError(f"got {values.numel()} {what}, but the graph has {self.num_edges} edges")
        return values if self.edge_ids is None else values[self.edge_ids.to(torch.int64)]

    def to_edge_index(self) -> Tensor:
        """Return the edges in the user's order, int64 ``[2, num_edges]``."""
        col = torch.repeat_interleave(torch.arange(self.num_nodes), self.indptr.diff())
        edge_index = torch.stack([self.indices.to(torch.int64), col])
        if self.edge_ids is None:
            return edge_index
        return edge_index[:, self.edge_ids.to(torch.int64).argsort()]  # ids can have gaps: edges with weight 0

    def cache_adjacency(self, nodes: Tensor, device: torch.device | str) -> CachedAdjacency:
        """Cache the adjacency lists of distinct nodes ``[n]`` on a device for sampling.

        Raises:
            IndexError: A node is outside the graph.
            ValueError: A node appears twice.
        """
        return CachedAdjacency.build(self.indptr, self.indices, nodes, device)

    @property
    def num_bytes(self) -> int:
        """Total bytes of all arrays."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def to(self, device: torch.device | str) -> CSCGraph:
        """Return a copy on a device."""
        return self._map(lambda tensor: tensor.to(device))

    def pin_memory(self) -> CSCGraph:
        """Return the graph in page-locked host memory, which accelerators can read; locks it in place if possible."""
        return self._map(pin_host_memory)

    def share_memory_(self) -> CSCGraph:
        """Move the arrays to shared memory, so that other processes map them instead of copying; returns self."""
        self._map(Tensor.share_memory_)
        return self

    def save(self, folder: str | Path) -> Path:
        """Write ``indptr.npy``, ``indices.npy`` and, if the orders differ, ``edge_ids.npy`` to a folder.

        Raises:
            OSError: The disk is full or not writable; the folder retains its previous files.
            ValueError: The graph has times, weights or another source type, which these files cannot store.
        """
        if self.time is not None or self.weight is not None or self.source_count is not None:
            raise ValueError("times, weights and types are not saved: save the plain graph, and add them after loading")
        folder = local_path(folder)
        save_arrays(folder, {"indptr": self.indptr, "indices": self.indices, "edge_ids": self.edge_ids})
        if self.edge_ids is None:  # remove those of a graph that was saved here before
            (folder / "edge_ids.npy").unlink(missing_ok=True)
        return folder

    @classmethod
    def load(cls, folder: str | Path, mmap: bool = True, num_sources: int | None = None) -> CSCGraph:
        """Load a graph written by :meth:`save`; with ``mmap``, arrays stay on disk and writes never reach the files.

        Raises:
            FileNotFoundError: A file is missing.
            OSError, MemoryError: A file cannot be read, or is too large.
            TypeError, ValueError: A file is truncated, or :meth:`from_csc` rejects the arrays.
        """
        folder = cached_path(folder)
        edge_ids = folder / "edge_ids.npy"
        arrays = (
            load_array(folder / "indptr.npy", mmap),
            load_array(folder / "indices.npy", mmap),
            load_array(edge_ids, mmap) if os.path.lexists(edge_ids) else None,
        )
        try:
            return cls.from_csc(*arrays, num_sources)
        except (TypeError, ValueError) as error:
            raise type(error)(f"the graph in {folder}: {error}") from None

    def _map(self, function: Callable[[Tensor], Tensor]) -> CSCGraph:
        names = ("indptr", "indices", "edge_ids", "time", "weight", "prefix")
        arrays = {name: getattr(self, name) for name in names}
        mapped: dict[str, Any] = {name: function(array) for name, array in arrays.items() if array is not None}
        return replace(self, **mapped)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_nodes={self.num_nodes}, num_edges={self.num_edges})"


def unexpected_graph(data: object, expected: str) -> TypeError:
    """Return the error for an object that is not a graph of the expected class."""
    message = f"expected {expected}, got {type(data).__name__}"
    if isinstance(data, tuple | list) and any(isinstance(store, FeatureStore | GraphStore) for store in data):
        message = (
            f"expected {expected}, got stores of features and of edges, which only PyG's loaders read; they use this "
            "package's sampler after lightning_gnn.enable_pyg_sampling(): loader = torch_geometric.loader."
            "NeighborLoader((feature_store, graph_store), …), or likewise PyG's LightningNodeData and LightningLinkData"
        )
    return TypeError(message)


def count_edges(data: Data | HeteroData) -> int:
    """Return the number of edges, including those of ``graph`` (:class:`CSCGraph`), which PyG does not count."""
    if isinstance(data, HeteroData):
        graphs = [(store, store.get("graph")) for store in data.edge_stores]
        return sum(int(store.num_edges if graph is None else graph.num_edges) for store, graph in graphs)
    graph = data.get("graph")
    return int(data.num_edges if graph is None else graph.num_edges)


def _count_nodes(edge_index: Tensor, num_nodes: int | None) -> int:
    """Return the number of nodes, after checking that their offsets fit into memory."""
    largest = int(edge_index.max()) if edge_index.numel() else -1
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, Integral | None):
        raise TypeError(f"num_nodes must be an integer, but is {num_nodes!r}")
    count = largest + 1 if num_nodes is None else int(num_nodes)
    if count < 0:
        raise ValueError(f"num_nodes must not be negative, but is {count}")
    memory = total_bytes()
    if 8 * count > memory:
        needs = f"the offsets of {count} nodes need {8 * count / 1e9:.0f} GB of this machine's {memory / 1e9:.0f} GB"
        fix = "number the nodes from 0 without gaps, or correct num_nodes"
        raise ValueError(f"{needs}; the largest id in edge_index is {largest}: {fix}")
    return count


def index_dtype(count: int) -> type:
    """Return the smallest NumPy dtype for ids below ``count``: int32 or int64."""
    return np.int32 if count <= INT32_MAX else np.int64


def narrow(ids: Tensor, count: int) -> Tensor:
    """Convert ids below ``count`` to int32 if they fit."""
    return ids.to(torch.int32) if count <= INT32_MAX else ids


@numba.njit(nogil=True, cache=True)
def sort_by_target(
    row: npt.NDArray[Any],  # sources, integer [E]
    col: npt.NDArray[Any],  # targets, integer [E], checked
    num_nodes: int,
    indices: npt.NDArray[Any],  # output: sorted sources, [E]
    edge_ids: npt.NDArray[Any],  # output: their positions in row, [E]
) -> npt.NDArray[np.int64]:
    """Sort edges by target (stable); return ``indptr``, int64 ``[N + 1]``."""
    indptr = np.zeros(num_nodes + 1, np.int64)
    for target in col:
        indptr[target + 1] += 1
    for v in range(num_nodes):
        indptr[v + 1] += indptr[v]
    next_position = indptr[:-1].copy()
    for e in range(col.size):
        at = next_position[col[e]]
        next_position[col[e]] = at + 1
        indices[at] = row[e]
        edge_ids[at] = e
    return indptr


def check_csc(indptr: Tensor, indices: Tensor, edge_ids: Tensor | None, num_sources: int) -> None:
    """Check CSC offsets ``[num_targets + 1]``, sources ``[num_edges]`` and the permutation of edges."""
    for name, tensor in (("indptr", indptr), ("indices", indices), ("edge_ids", edge_ids)):
        if tensor is not None:
            check_integers(tensor, name)
            if tensor.dim() != 1:
                raise ValueError(f"{name} must have one dimension, but has the shape {list(tensor.shape)}")
    num_edges = indices.numel()
    if indptr.numel() < 1 or int(indptr[0]) != 0 or int(indptr[-1]) != num_edges:
        ends = f"{int(indptr[0])} and {int(indptr[-1])}" if indptr.numel() else "nothing"
        raise ValueError(f"indptr must start at 0 and end at the number of edges, {num_edges}, but holds {ends}")
    if bool((indptr[1:] < indptr[:-1]).any()):
        at = int((indptr[1:] < indptr[:-1]).nonzero()[0])
        before, after = int(indptr[at]), int(indptr[at + 1])
        raise ValueError(f"indptr must not descend, but indptr[{at}] = {before} > {after} = indptr[{at + 1}]")
    check_ids(indices, num_sources, "indices")
    if edge_ids is not None:
        if edge_ids.numel() != num_edges:
            raise ValueError(f"edge_ids must hold one id per edge, {num_edges}, but holds {edge_ids.numel()}")
        check_ids(edge_ids, num_edges, "edge_ids", "edge")


def check_integers(tensor: Tensor, name: str) -> None:
    """Raise a TypeError unless this is an int32 or int64 tensor; ``name`` is for the message."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, but is {type(tensor).__name__}")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, but is {tensor.dtype}; convert it with .long()")


def check_edge_index(edge_index: Tensor) -> None:
    """Raise a TypeError or a ValueError unless this is an integer tensor ``[2, E]``."""
    check_integers(edge_index, "edge_index")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(f"edge_index must have the shape [2, num_edges], but has {list(edge_index.shape)}")


def unwrap(indices: Tensor) -> Tensor:
    """Return PyG's EdgeIndex, or another subclass, as a plain tensor that shares its memory."""
    # as_subclass of torch 2.8 refuses an EdgeIndex, which wraps its tensor.
    return indices.as_tensor() if isinstance(indices, EdgeIndex) else indices.as_subclass(Tensor)


def check_ids(ids: Tensor, count: int, name: str, kind: str = "node") -> None:
    """Raise a ValueError unless all ids are in ``[0, count)``; ``name`` and ``kind`` are for the message."""
    if ids.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0:
        raise ValueError(f"{name} holds {kind} {low}, but ids start at 0")
    if high >= count:
        raise ValueError(f"{name} holds {kind} {high}, but the graph has {count} {kind}s")

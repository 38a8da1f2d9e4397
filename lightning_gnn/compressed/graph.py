"""A whole graph in CSR format, for operators that aggregate over all edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_gnn.compressed.builder import ChipLayout, layout_of
from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.compressed.self_loops import loop_rows, pick, symmetric_norm
from lightning_gnn.graph.csc import INT32_MAX, CSCGraph
from lightning_gnn.graph.csr import CSR
from lightning_gnn.runtime.store import checksum

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class CompressedGraph:
    """A whole graph in CSR format, one row per target, for ops that aggregate over all edges.

    Build it with one of the ``from_…`` constructors, which check their input. It can be used as ``Data.edge_index``.
    The first gradient builds its transpose, and the first aggregation on an NPU its chunks (:meth:`chunked`).

    Args:
        forward: Rows are targets, columns are sources.
        edge_ids: Position of each forward entry in the user's ``edge_index``, int32 or int64 ``[num_edges]``, -1 for an
            added self-loop; None if both orders are equal.
        settings: Workers and groups that execute an aggregation.
        num_user_edges: Number of edges in the user's ``edge_index``.
        cache: Values derived from the graph, such as normalized weights; not compared.

    Examples:
        >>> import torch
        >>> from lightning_gnn import CompressedGraph, aggregate
        >>> sources, targets = [0, 2, 1, 0], [1, 1, 2, 2]
        >>> graph = CompressedGraph.from_edge_index(torch.tensor([sources, targets]))
        >>> graph
        CompressedGraph(num_sources=3, num_targets=3, num_edges=4)
        >>> aggregate(graph, torch.eye(3))  # row v counts the edges into v by their source
        tensor([[0., 0., 0.],
                [1., 0., 1.],
                [1., 1., 0.]])
    """

    forward: CSR
    edge_ids: Tensor | None = None
    settings: PlanSettings = field(default_factory=PlanSettings)
    num_user_edges: int = -1
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.num_user_edges < 0:
            object.__setattr__(self, "num_user_edges", self.num_edges)

    @property
    def backward(self) -> CSR:
        """Transpose: rows are sources, columns are targets; its ``edge_ids`` are positions of forward entries."""
        return self.forward.transposed()

    @property
    def num_sources(self) -> int:
        """Number of source vertices: rows of the features that are aggregated."""
        return self.forward.num_columns

    @property
    def num_targets(self) -> int:
        """Number of target vertices: rows of the result."""
        return self.forward.num_rows

    @property
    def num_edges(self) -> int:
        """Number of edges, including duplicates and self-loops."""
        return self.forward.num_edges

    @property
    def device(self) -> torch.device:
        """Device of the arrays."""
        return self.forward.indices.device

    @property
    def in_degrees(self) -> Tensor:
        """In-degree of each target, int64 ``[num_targets]``."""
        return self._get_or_compute("in_degrees", self.forward.degrees)

    @property
    def out_degrees(self) -> Tensor:
        """Out-degree of each source, int64 ``[num_sources]``."""
        count = self.num_sources
        return self._get_or_compute("out_degrees", lambda: torch.bincount(self.forward.indices, minlength=count))

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, including those of the transpose if it has been built."""
        return self.forward.stored_bytes() + (0 if self.edge_ids is None else self.edge_ids.nbytes)

    @classmethod
    def from_graph(cls, graph: CSCGraph, *, settings: PlanSettings | None = None) -> CompressedGraph:
        """Build it from a :class:`CSCGraph`, sharing its arrays; ``settings`` select who executes an aggregation.

        Raises:
            TypeError: ``graph`` is not a CSCGraph, or an option is unknown.
            ValueError: The graph has more than 2^31 - 1 sources or targets.
        """
        if not isinstance(graph, CSCGraph):
            kind = type(graph).__name__
            raise TypeError(f"graph must be a CSCGraph, but is {kind}; use from_edge_index for a tensor")
        if max(graph.num_sources, graph.num_nodes) > INT32_MAX:
            size = max(graph.num_sources, graph.num_nodes)
            raise ValueError(f"a compressed graph has at most {INT32_MAX} vertices, not {size}; partition it first")
        with _leave_inference_mode():
            graph = graph.to("cpu")
            arrays = (graph.indptr, graph.indices, graph.edge_ids)
            indptr, indices, edge_ids = (_to_normal_tensor(array) for array in arrays)
            assert indptr is not None
            assert indices is not None
            # detach() creates a new tensor object, which is this graph's key in the caches of transposes and layouts.
            forward = CSR(indptr, indices.to(torch.int32).contiguous().detach(), graph.num_sources)
        return cls(forward, edge_ids, settings or PlanSettings())

    @classmethod
    def from_edge_index(
        cls, edge_index: Tensor, num_nodes: int | None = None, settings: PlanSettings | None = None
    ) -> CompressedGraph:
        """Sort a COO edge list, int32 or int64 ``[2, num_edges]``, by target; see :meth:`from_graph`."""
        return cls.from_graph(CSCGraph.from_edge_index(edge_index, num_nodes), settings=settings)

    @classmethod
    def from_csc(
        cls, indptr: Tensor, indices: Tensor, num_sources: int, edge_ids: Tensor | None = None, **options: Any
    ) -> CompressedGraph:
        """Build it from CSC arrays of a bipartite graph; see :meth:`CSCGraph.from_csc`."""
        return cls.from_graph(CSCGraph.from_csc(indptr, indices, edge_ids, num_sources), **options)

    def chunked(self, *, transposed: bool = False) -> ChipLayout:
        """Return one direction in chunks of rows that share in-neighbors, for NPUs (NeutronAscend, section 6.2).

        Rows are in the order of algorithm 2, or of their ids if that loads fewer rows, unless ``settings.chunks`` is
        ``"paper"``; with ``transposed``, rows are sources. A chunk has at most 2048 rows plus columns; larger rows are
        split. It has at most 4096 edges, or 1/1024 of all edges if that is more, so that ranges of chunks can be
        balanced. The result is cached with the graph.
        """
        return layout_of(self.backward if transposed else self.forward, self.settings.chunks)

    def to_edge_index(self) -> Tensor:
        """Return the edges in the user's order, int64 ``[2, num_edges]``, followed by added self-loops."""
        edge_index = torch.stack([self.forward.indices, self.forward.entry_rows()]).to(torch.int64)
        if self.edge_ids is None:
            return edge_index
        ids = self.edge_ids.to(torch.int64)
        return edge_index[:, torch.where(ids < 0, self.num_user_edges + edge_index[1], ids).argsort()]

    def edge_order(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Permute values ``[num_user_edges, …]`` from the user's edge order to the order of the forward direction.

        Differentiable; ``fill`` is the value of added self-loops.

        Raises:
            ValueError: The number of values differs from the number of edges.
        """
        self.check_edge_values(values, "values")
        return values if self.edge_ids is None else pick(values, self.edge_ids, fill)

    def with_self_loops(self) -> CompressedGraph:
        """Return the graph with exactly one self-loop per vertex, in O(E); cached for later calls.

        Existing self-loops are replaced. ``edge_ids`` is -1 for all self-loops.

        Raises:
            ValueError: The graph is bipartite.
        """

        def add_loops() -> CompressedGraph:
            self._check_square("self-loops")
            graph = self.to("cpu")
            forward = graph.forward
            user_edges = torch.arange(self.num_edges) if graph.edge_ids is None else graph.edge_ids
            looped = loop_rows(0, forward.indptr.numpy(), forward.indices.numpy(), user_edges.numpy())
            rows = CSR(torch.from_numpy(looped.indptr), torch.from_numpy(looped.columns), self.num_sources)
            edge_ids, weight_ids = (torch.from_numpy(ids).to(rows.edge_dtype) for ids in looped[2:])
            result = replace(graph, forward=rows, edge_ids=edge_ids, cache={"weight_ids": weight_ids})
            return result.to(self.device)

        return self._get_or_compute("with_self_loops", add_loops)

    def gcn_weight(
        self,
        edge_weight: Tensor | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the symmetric normalization of GCN (arXiv:1609.02907), equal to ``torch_geometric``'s ``gcn_norm``.

        Args:
            edge_weight: ``[num_user_edges]`` in the order of the user's ``edge_index``, differentiable; None means
                ones, and the result is cached for later calls.
            improved: Weight added self-loops by 2 instead of 1 (as PyG: only with ``edge_weight``). An existing
                self-loop retains its weight, the last one if a vertex has several.
            add_self_loops: Normalize the graph :meth:`with_self_loops`.
            dtype: Dtype of the result without ``edge_weight``; by default torch's default.

        Returns:
            Weights ``[num_edges]`` of the normalized graph, in the order of the forward direction.

        Raises:
            ValueError: The graph is bipartite, or the number of weights differs from the number of edges.
        """
        if edge_weight is not None:
            self.check_edge_values(edge_weight, "edge_weight")
            return self._normalize(edge_weight, improved, add_self_loops, None)
        dtype = dtype or torch.get_default_dtype()
        key = f"gcn_weight add_self_loops={add_self_loops} {dtype}"
        return self._get_or_compute(key, lambda: self._normalize(None, improved, add_self_loops, dtype))

    def _normalize(
        self, edge_weight: Tensor | None, improved: bool, add_self_loops: bool, dtype: torch.dtype | None
    ) -> Tensor:
        self._check_square("the symmetric normalization")
        looped = self.with_self_loops() if add_self_loops else self
        if edge_weight is None:
            return symmetric_norm(looped.forward, looped.forward.degrees().to(dtype))
        if add_self_loops:
            values = pick(edge_weight, looped.cache["weight_ids"], 2.0 if improved else 1.0)
        else:
            values = self.edge_order(edge_weight)
        degrees = values.new_zeros(looped.num_targets).index_add(0, looped.forward.entry_rows(), values)
        return symmetric_norm(looped.forward, degrees, values)

    def checksum(self) -> str:
        """Return a checksum of the graph in hexadecimal digits; takes one pass over the edges."""
        parts = self.forward.indptr, self.forward.indices, self.edge_ids
        return checksum(self.num_sources, self.num_targets, self.num_user_edges, *parts)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CompressedGraph:
        """Return a copy on a device, including cached values, or ``self`` if it is already there."""
        if (device := torch.empty(0, device=device).device) == self.device:
            return self

        def move(value: object) -> Any:
            return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value

        with _leave_inference_mode():
            cache = {key: move(value) for key, value in self.cache.items()}
            return replace(self, forward=move(self.forward), edge_ids=move(self.edge_ids), cache=cache)

    def replace_settings(self, settings: PlanSettings) -> CompressedGraph:
        """Return the same graph with other settings for the ops; all tensors are shared."""
        cache = {
            key: value.replace_settings(settings) if isinstance(value, CompressedGraph) else value
            for key, value in self.cache.items()
        }
        return replace(self, settings=settings, cache=cache)

    def _check_square(self, what: str) -> None:
        if self.num_sources != self.num_targets:
            sizes = f"the graph has {self.num_sources} sources and {self.num_targets} targets"
            raise ValueError(f"{what} must have the same vertices on both sides, but {sizes}")

    def check_edge_values(self, values: Tensor, name: str) -> None:
        """Raise a ValueError unless values have one entry per user edge; ``name`` is for the message."""
        if values.dim() < 1 or values.size(0) != self.num_user_edges:
            expected = f"one entry per edge of the graph, {self.num_user_edges}"
            raise ValueError(f"{name} must have {expected}, but has the shape {list(values.shape)}")

    def _get_or_compute(self, name: str, function: Callable[[], T]) -> T:
        if name not in self.cache:
            with _leave_inference_mode():
                self.cache[name] = function()
        value: T = self.cache[name]
        return value

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_sources={self.num_sources}, num_targets={self.num_targets}, "
            f"num_edges={self.num_edges})"
        )


@contextmanager
def _leave_inference_mode() -> Iterator[None]:
    """Create tensors that autograd can save, even if validation creates them first in ``inference_mode``."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _to_normal_tensor(tensor: Tensor | None) -> Tensor | None:
    """Convert an inference tensor to one that shares its memory and that autograd can save."""
    return torch.from_numpy(tensor.numpy()) if tensor is not None and tensor.is_inference() else tensor

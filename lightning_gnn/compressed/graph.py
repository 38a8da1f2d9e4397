"""A whole graph in compressed rows, for operators that aggregate over all of it."""

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
from lightning_gnn.runtime.messages import removed
from lightning_gnn.runtime.store import checksum

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class CompressedGraph:
    """A whole graph in compressed rows (CSR), one row per target, for ops that aggregate over all of it.

    Build it with one of the ``from_…`` constructors, which check their input. It rides in ``Data.edge_index``. Its
    transpose is made when a gradient first asks for it, and its chunks (:meth:`chunked`) when an NPU aggregates.

    Args:
        forward: Rows are targets, columns are sources.
        edge_ids: Place of each forward entry in the user's ``edge_index``, int32 or int64 ``[num_edges]``, -1 for a
            self-loop that was added; None where both orders are the same.
        settings: Who executes an aggregation.
        num_user_edges: Edges in the user's ``edge_index``.
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
        """The transpose: rows are sources, columns targets; ``edge_ids`` names the forward places of its entries."""
        return self.forward.transposed()

    @property
    def num_sources(self) -> int:
        """Vertices that edges start from: rows of what is aggregated."""
        return self.forward.num_columns

    @property
    def num_targets(self) -> int:
        """Vertices that edges end at: rows of the result."""
        return self.forward.num_rows

    @property
    def num_edges(self) -> int:
        """Edges, duplicates and self-loops counted."""
        return self.forward.num_edges

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.forward.indices.device

    @property
    def in_degrees(self) -> Tensor:
        """Edges into each target, int64 ``[num_targets]``."""
        return self._derived("in_degrees", self.forward.degrees)

    @property
    def out_degrees(self) -> Tensor:
        """Edges out of each source, int64 ``[num_sources]``."""
        count = self.num_sources
        return self._derived("out_degrees", lambda: torch.bincount(self.forward.indices, minlength=count))

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, those of the transpose too where it was made."""
        return self.forward.known_bytes() + (0 if self.edge_ids is None else self.edge_ids.nbytes)

    @classmethod
    def from_graph(cls, graph: CSCGraph, *, settings: PlanSettings | None = None, **gone: object) -> CompressedGraph:
        """Take a graph's arrays, which are shared, not copied; ``settings`` say who executes an aggregation.

        Raises:
            TypeError: ``graph`` is no CSCGraph, or there is no such option.
            ValueError: More than 2^31 - 1 vertices on a side.
        """
        _refuse_options("CompressedGraph", gone)
        if not isinstance(graph, CSCGraph):
            raise TypeError(
                f"graph must be a CSCGraph, but is {type(graph).__name__}; use from_edge_index for a tensor"
            )
        if max(graph.num_sources, graph.num_nodes) > INT32_MAX:
            raise ValueError(
                f"a compressed graph has at most {INT32_MAX} vertices on a side; partition the graph first"
            )
        with _plain_tensors():
            graph = graph.to("cpu")
            indptr, indices, edge_ids = (_plain(each) for each in (graph.indptr, graph.indices, graph.edge_ids))
            assert indptr is not None
            assert indices is not None
            # A tensor object of its own, by which what is derived of the graph is known.
            forward = CSR(indptr, indices.to(torch.int32).contiguous().detach(), graph.num_sources)
        return cls(forward, edge_ids, settings or PlanSettings())

    @classmethod
    def from_edge_index(
        cls, edge_index: Tensor, num_nodes: int | None = None, settings: PlanSettings | None = None, **gone: object
    ) -> CompressedGraph:
        """Sort a COO edge list, int32 or int64 ``[2, num_edges]``, by target; see :meth:`from_graph`."""
        return cls.from_graph(CSCGraph.from_edge_index(edge_index, num_nodes), settings=settings, **gone)

    @classmethod
    def from_csc(
        cls, indptr: Tensor, indices: Tensor, num_sources: int, edge_ids: Tensor | None = None, **options: Any
    ) -> CompressedGraph:
        """Take a bipartite graph, sources and targets numbered on their own, as :meth:`CSCGraph.from_csc` does."""
        return cls.from_graph(CSCGraph.from_csc(indptr, indices, edge_ids, num_sources), **options)

    def chunked(self, *, transposed: bool = False, **gone: object) -> ChipLayout:
        """Return a direction in chunks of rows that share in-neighbors, as NPUs read it (NeutronAscend, section 6.2).

        Rows are in the order of algorithm 2, unless that of their ids loads fewer rows; those of the direction
        ``transposed`` are sources. A chunk has at most 2048 rows and columns together, and a row that overfills one is
        split; so is a chunk with more than twice as many edges, and more than a 1024th of all: ranges of chunks can
        then be balanced. Kept as long as the graph.
        """
        _refuse_options("chunked", gone)
        return layout_of(self.backward if transposed else self.forward)

    def to_edge_index(self) -> Tensor:
        """Return the edges in the user's order, int64 ``[2, num_edges]``; self-loops that were added come last."""
        edge_index = torch.stack([self.forward.indices, self.forward.entry_rows()]).to(torch.int64)
        if self.edge_ids is None:
            return edge_index
        ids = self.edge_ids.to(torch.int64)
        return edge_index[:, torch.where(ids < 0, self.num_user_edges + edge_index[1], ids).argsort()]

    def edge_order(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Bring values ``[num_user_edges, …]`` from the user's order of the edges into that of the forward direction.

        Differentiable; ``fill`` is the value of the self-loops that were added.

        Raises:
            ValueError: Another number of values than edges.
        """
        self.check_edge_values(values, "values")
        return values if self.edge_ids is None else pick(values, self.edge_ids, fill)

    def with_self_loops(self) -> CompressedGraph:
        """Return the graph with exactly one self-loop per vertex, in O(E); kept for later calls.

        Self-loops that exist are replaced. ``edge_ids`` is -1 for all of them.

        Raises:
            ValueError: The graph is bipartite.
        """

        def looped() -> CompressedGraph:
            self._check_square("self-loops")
            graph = self.to("cpu")
            forward = graph.forward
            user_edges = torch.arange(self.num_edges) if graph.edge_ids is None else graph.edge_ids
            found = loop_rows(0, forward.indptr.numpy(), forward.indices.numpy(), user_edges.numpy())
            indptr, columns = torch.from_numpy(found.indptr), torch.from_numpy(found.columns)
            rows = CSR(indptr, columns, self.num_sources)
            edge_ids, weight_ids = (torch.from_numpy(ids).to(rows.edge_dtype) for ids in found[2:])
            made = replace(graph, forward=rows, edge_ids=edge_ids, cache={"weight_ids": weight_ids})
            return made.to(self.device)

        return self._derived("with_self_loops", looped)

    def gcn_weight(
        self,
        edge_weight: Tensor | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the symmetric normalization of GCN (arXiv:1609.02907), as ``torch_geometric``'s ``gcn_norm`` has it.

        Args:
            edge_weight: ``[num_user_edges]`` in the order of the user's ``edge_index``, differentiable, or None for
                ones; without it the result is kept for later calls.
            improved: Self-loops that are added weigh 2, not 1 (PyG: only with ``edge_weight``). One that exists keeps
                its weight, of several the last one.
            add_self_loops: Normalize the graph :meth:`with_self_loops`.
            dtype: Of the result where there is no ``edge_weight``; by default torch's default.

        Returns:
            ``[num_edges]`` of the normalized graph, in the order of the forward direction.

        Raises:
            ValueError: The graph is bipartite, or another number of weights than edges.
        """
        if edge_weight is not None:
            self.check_edge_values(edge_weight, "edge_weight")
            return self._normalized(edge_weight, improved, add_self_loops, None)
        dtype = dtype or torch.get_default_dtype()
        key = f"gcn_weight add_self_loops={add_self_loops} {dtype}"
        return self._derived(key, lambda: self._normalized(None, improved, add_self_loops, dtype))

    def _normalized(
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
        """Return hexadecimal digits that tell graphs apart: one pass over the edges."""
        parts = self.forward.indptr, self.forward.indices, self.edge_ids
        return checksum(self.num_sources, self.num_targets, self.num_user_edges, *parts)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CompressedGraph:
        """Return a copy on a device with all that is derived, or this where it is there already."""
        if (device := torch.empty(0, device=device).device) == self.device:
            return self

        def moved(value: object) -> Any:
            return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value

        with _plain_tensors():
            cache = {key: moved(value) for key, value in self.cache.items()}
            return replace(self, forward=moved(self.forward), edge_ids=moved(self.edge_ids), cache=cache)

    def replace_settings(self, settings: PlanSettings) -> CompressedGraph:
        """Return the same graph, all tensors shared, with other settings for the ops."""
        cache = {
            key: value.replace_settings(settings) if isinstance(value, CompressedGraph) else value
            for key, value in self.cache.items()
        }
        return replace(self, settings=settings, cache=cache)

    def _check_square(self, what: str) -> None:
        if self.num_sources != self.num_targets:
            sides = f"the graph has {self.num_sources} sources and {self.num_targets} targets"
            raise ValueError(f"{what} must have the same vertices on both sides, but {sides}")

    def check_edge_values(self, values: Tensor, name: str) -> None:
        """Raise a ValueError unless there is one value per edge of the user's; ``name`` is for the message."""
        if values.dim() < 1 or values.size(0) != self.num_user_edges:
            wanted = f"one entry per edge of the graph, {self.num_user_edges}"
            raise ValueError(f"{name} must have {wanted}, but has the shape {list(values.shape)}")

    def _derived(self, name: str, function: Callable[[], T]) -> T:
        if name not in self.cache:
            with _plain_tensors():
                self.cache[name] = function()
        value: T = self.cache[name]
        return value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            removed(f"CompressedGraph.{name}") or f"{type(self).__name__!r} object has no attribute {name!r}"
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_sources={self.num_sources}, num_targets={self.num_targets}, "
            f"num_edges={self.num_edges})"
        )


def _refuse_options(of: str, gone: dict[str, object]) -> None:
    for name in gone:
        raise TypeError(removed(f"{of}.{name}") or f"{of} has no option {name}")


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make tensors that autograd can save also inside ``inference_mode``, where validation may ask for them first."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _plain(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor of the same memory that autograd can save, though this one was made in inference mode."""
    return torch.from_numpy(tensor.numpy()) if tensor is not None and tensor.is_inference() else tensor

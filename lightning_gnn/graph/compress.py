"""A graph compressed for full-graph aggregation: chunks of rows that share neighbours, both directions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lightning_gnn.graph.arrays import load_array, save_arrays
from lightning_gnn.graph.build import (
    Limits,
    Order,
    Redundancy,
    Wanted,
    build_directions,
    choose_limits,
    measure_redundancy,
)
from lightning_gnn.graph.chunks import Chunks, check_places
from lightning_gnn.graph.csc import INT32_MAX, CSCGraph, check_csc
from lightning_gnn.graph.hybrid_plan import PlanSettings
from lightning_gnn.graph.partition import Progress
from lightning_gnn.graph.self_loops import add_self_loops, pick, symmetric_norm
from lightning_gnn.runtime.files import read_json, read_text, write_whole
from lightning_gnn.runtime.store import checksum

_FORMAT = "lightning_gnn compressed graph 1"
_META = "graph.json"
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class CompressedGraph:
    """A graph in chunks whose rows share in-neighbours, for ops that aggregate over all of it (section 6.2).

    Build it with one of the ``from_…`` constructors, which check their input. It rides in ``Data.edge_index``.

    Args:
        forward: Rows are targets, columns are sources.
        backward: The transpose: rows are sources, columns are targets, and ``edge_ids`` names the places of its
            entries in the forward direction. A symmetric graph shares all other arrays with ``forward``.
        edge_ids: Place of each forward entry in the user's ``edge_index``, int32 or int64 ``[num_edges]``, -1 for a
            self-loop that was added; None where both orders are the same.
        settings: How the ops share the work out to workers.
        order: ``"locality"`` where the forward rows are in the order of algorithm 2; ``"natural"`` where they are in
            the order of their ids, be it that this was asked for or that it loads fewer rows.
        backward_order: The same for the transpose.
        limits: How the rows were cut into chunks, or None where that is not known.
        num_user_edges: Edges in the user's ``edge_index``.
        cache: Values derived from the graph, such as normalised weights; neither compared nor saved.

    Examples:
        >>> import torch
        >>> from lightning_gnn import CompressedGraph, aggregate
        >>> sources, targets = [0, 2, 1, 0], [1, 1, 2, 2]
        >>> graph = CompressedGraph.from_edge_index(torch.tensor([sources, targets]), num_chunks=3, order="natural")
        >>> graph
        CompressedGraph(num_sources=3, num_targets=3, num_edges=4, num_chunks=3, order='natural')
        >>> aggregate(graph, torch.eye(3))  # row v counts the edges into v by their source
        tensor([[0., 0., 0.],
                [1., 0., 1.],
                [1., 1., 0.]])
        >>> graph.redundancy().rows_loaded  # two in-neighbours in each of two chunks
        4
    """

    forward: Chunks
    backward: Chunks
    edge_ids: Tensor | None = None
    settings: PlanSettings = field(default_factory=PlanSettings)
    order: Order = "natural"
    backward_order: Order = "natural"
    limits: Limits | None = None
    num_user_edges: int = -1
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.num_user_edges < 0:
            object.__setattr__(self, "num_user_edges", self.num_edges)

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
        return self.forward.local.numel()

    @property
    def num_chunks(self) -> int:
        """Chunks of the forward direction."""
        return self.forward.num_chunks

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.forward.local.device

    @property
    def shares_chunks(self) -> bool:
        """Whether both directions have the same arrays, but for ``edge_ids``: the graph is symmetric."""
        return self.backward.local is self.forward.local

    @property
    def in_degrees(self) -> Tensor:
        """Edges into each target, int64 ``[num_targets]``."""
        return self._derived("in_degrees", self.forward.degrees)

    @property
    def out_degrees(self) -> Tensor:
        """Edges out of each source, int64 ``[num_sources]``."""
        return self._derived("out_degrees", self.backward.degrees)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays; one that both directions share counts once."""
        tensors = [self.edge_ids, *self.forward.tensors().values(), *self.backward.tensors().values()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor is not None}.values())

    @classmethod
    def from_graph(
        cls,
        graph: CSCGraph,
        num_chunks: int | Literal["auto"] = "auto",
        order: Wanted = "locality",
        *,
        num_columns_hint: int = 64,
        element_size: int = 4,
        local_bytes: int | None = None,
        settings: PlanSettings | None = None,
        progress: Progress | None = None,
    ) -> CompressedGraph:
        """Partition and compress a graph.

        Args:
            graph: The topology.
            num_chunks: Chunks per direction, each of floor or ceil of V / k vertices; or ``"auto"``, as few as fit the
                local memory.
            order: ``"locality"`` (algorithm 2), unless the natural order loads fewer rows; ``"natural"``; ``"auto"``,
                what takes a CPU less time by a model of its caches, :mod:`lightning_gnn.graph.cache_model`.
            num_columns_hint: Width of the feature slices that a chunk is to be sized for.
            element_size: Bytes of a feature.
            local_bytes: Local memory of a worker: the level-2 cache of a core, the L1 buffer of a cube unit. A chunk
                takes at most half of it (double buffer): ``(rows + columns) * num_columns_hint * element_size`` bytes.
                A row that overfills a chunk is split. So is a chunk with more than twice as many edges as it may have
                vertices, and more than a 1024th of all: ranges of chunks can then be balanced. By default 1 MiB with
                ``"auto"``, which makes 2048 vertices, else without limit.
            settings: How the ops share the work out; if it says how many workers, ``"auto"`` makes a multiple of that.
            progress: Called with the name of a step and the fraction that is done, from 0 to 1.

        Raises:
            TypeError: ``graph`` is no CSCGraph.
            ValueError: An argument out of range, or local memory too small for one edge.
        """
        if not isinstance(graph, CSCGraph):
            raise TypeError(
                f"graph must be a CSCGraph, but is {type(graph).__name__}; use from_edge_index for a tensor"
            )
        limits = choose_limits(num_chunks, num_columns_hint, element_size, local_bytes, settings)
        return cls._build(graph, graph.num_nodes, order, limits, settings, progress)

    @classmethod
    def from_edge_index(cls, edge_index: Tensor, num_nodes: int | None = None, **options: Any) -> CompressedGraph:
        """Partition and compress a COO edge list, int32 or int64 ``[2, num_edges]``; see :meth:`from_graph`."""
        return cls.from_graph(CSCGraph.from_edge_index(edge_index, num_nodes), **options)

    @classmethod
    def from_csc(
        cls,
        indptr: Tensor,
        indices: Tensor,
        num_sources: int,
        edge_ids: Tensor | None = None,
        num_chunks: int | Literal["auto"] = "auto",
        order: Wanted = "locality",
        *,
        num_columns_hint: int = 64,
        element_size: int = 4,
        local_bytes: int | None = None,
        settings: PlanSettings | None = None,
        progress: Progress | None = None,
    ) -> CompressedGraph:
        """Partition and compress a bipartite graph, sources and targets numbered on their own.

        Args:
            indptr: Offsets, integer ``[num_targets + 1]``.
            indices: Source of each edge, integer ``[num_edges]``.
            num_sources: Number of sources.
            edge_ids: Place of each edge in the user's order, integer ``[num_edges]``, or None.
            num_chunks: Chunks per direction, or ``"auto"``: as few as fit the local memory.
            order: ``"locality"``, unless the natural order loads fewer rows, ``"natural"`` or ``"auto"``.
            num_columns_hint: Width of the feature slices that a chunk is to be sized for.
            element_size: Bytes of a feature.
            local_bytes: Local memory of a worker, of which a chunk takes at most half; :meth:`from_graph` tells more.
            settings: How the ops share the work out to workers.
            progress: Called with the name of a step and the fraction that is done, from 0 to 1.

        Raises:
            TypeError: A tensor is not of an integer dtype.
            ValueError: As for :meth:`CSCGraph.from_csc` and :meth:`from_graph`.
        """
        check_csc(indptr, indices, edge_ids, num_sources)
        graph = CSCGraph(indptr.to(torch.int64).contiguous(), indices.contiguous(), edge_ids)
        limits = choose_limits(num_chunks, num_columns_hint, element_size, local_bytes, settings)
        return cls._build(graph, num_sources, order, limits, settings, progress)

    @classmethod
    def _build(
        cls,
        graph: CSCGraph,
        num_sources: int,
        order: Wanted,
        limits: Limits,
        settings: PlanSettings | None,
        progress: Progress | None,
    ) -> CompressedGraph:
        if order not in ("auto", "locality", "natural"):
            raise ValueError(f"order must be 'auto', 'locality' or 'natural', but is {order!r}")
        if max(num_sources, graph.num_nodes) > INT32_MAX:
            raise ValueError(
                f"a compressed graph has at most {INT32_MAX} vertices on a side; partition the graph first"
            )
        with _plain_tensors():
            graph = graph.to("cpu")
            forward, backward = build_directions(
                graph.indptr.numpy(), graph.indices.numpy(), num_sources, order, limits, progress
            )
            places = torch.from_numpy(forward.places)
            if graph.edge_ids is not None:
                edge_ids: Tensor | None = graph.edge_ids[places]
            elif forward.order == "natural":
                edge_ids = None
            else:
                edge_ids = places.to(forward.chunks.edge_dtype)
        settings = settings or PlanSettings()
        return cls(
            forward.chunks, backward.chunks, edge_ids, settings, forward.order, backward.order, limits, graph.num_edges
        )

    def to_edge_index(self) -> Tensor:
        """Return the edges in the user's order, int64 ``[2, num_edges]``; self-loops that were added come last."""
        edge_index = torch.stack([self.forward.entry_columns(), self.forward.entry_rows()]).to(torch.int64)
        if self.edge_ids is None:
            return edge_index
        ids = self.edge_ids.to(torch.int64)
        return edge_index[:, torch.where(ids < 0, self.num_user_edges + edge_index[1], ids).argsort()]

    def edge_order(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Bring values of the edges into the order of the forward direction, in which the ops take them.

        Args:
            values: ``[num_user_edges, …]``, in the order of the user's ``edge_index``; differentiable.
            fill: Value of the self-loops that were added.

        Raises:
            ValueError: Another number of values than edges.
        """
        self.check_edge_values(values, "values")
        return values if self.edge_ids is None else pick(values, self.edge_ids, fill)

    def with_self_loops(self) -> CompressedGraph:
        """Return the graph with exactly one self-loop per vertex, in the same partition, in O(E); kept for later calls.

        Self-loops that exist are replaced. ``edge_ids`` is -1 for all of them.

        Raises:
            ValueError: The graph is bipartite.
        """

        def looped() -> CompressedGraph:
            self._check_square("self-loops")
            graph = self.to("cpu")
            found = add_self_loops(graph.forward, graph.backward, graph.edge_ids)
            forward, backward, edge_ids, weight_ids = found
            graph = replace(graph, forward=forward, backward=backward, edge_ids=edge_ids)
            return replace(graph, cache={"weight_ids": weight_ids}).to(self.device)

        return self._derived("with_self_loops", looped)

    def gcn_weight(
        self,
        edge_weight: Tensor | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the symmetric normalisation of GCN (arXiv:1609.02907), as ``torch_geometric``'s ``gcn_norm`` has it.

        Args:
            edge_weight: ``[num_user_edges]`` in the order of the user's ``edge_index``, differentiable, or None for
                ones; without it the result is kept for later calls.
            improved: Self-loops that are added weigh 2, not 1 (PyG: only with ``edge_weight``). One that exists keeps
                its weight, of several the last one.
            add_self_loops: Normalise the graph :meth:`with_self_loops`.
            dtype: Of the result where there is no ``edge_weight``; by default torch's default.

        Returns:
            ``[num_edges]`` of :meth:`with_self_loops`, or of this graph without ``add_self_loops``, in the order of
            the forward direction.

        Raises:
            ValueError: The graph is bipartite, or another number of weights than edges.
        """
        if edge_weight is not None:
            self.check_edge_values(edge_weight, "edge_weight")
            return self._normalised(edge_weight, improved, add_self_loops, None)
        dtype = dtype or torch.get_default_dtype()
        key = f"gcn_weight add_self_loops={add_self_loops} {dtype}"
        return self._derived(key, lambda: self._normalised(None, improved, add_self_loops, dtype))

    def _normalised(
        self, edge_weight: Tensor | None, improved: bool, add_self_loops: bool, dtype: torch.dtype | None
    ) -> Tensor:
        self._check_square("the symmetric normalisation")
        looped = self.with_self_loops() if add_self_loops else self
        if edge_weight is None:
            return symmetric_norm(looped.forward, looped.forward.degrees().to(dtype))
        if add_self_loops:
            values = pick(edge_weight, looped.cache["weight_ids"], 2.0 if improved else 1.0)
        else:
            values = self.edge_order(edge_weight)
        degrees = values.new_zeros(looped.num_targets).index_add(0, looped.forward.entry_rows(), values)
        return symmetric_norm(looped.forward, degrees, values)

    def redundancy(self, direction: Literal["forward", "backward"] = "forward") -> Redundancy:
        """Count the rows that an aggregation loads, against the natural order and a random one; it prints as a table.

        Raises:
            ValueError: Another direction.
        """
        if direction not in ("forward", "backward"):
            raise ValueError(f"direction must be 'forward' or 'backward', but is {direction!r}")
        forward = direction == "forward"
        chunks = (self.forward if forward else self.backward).to("cpu")
        limits = self.limits or Limits(chunks.num_chunks, None)
        return measure_redundancy(chunks, limits, self.order if forward else self.backward_order)

    def checksum(self) -> str:
        """Return hexadecimal digits that tell graphs apart, or the same graph in other chunks: one pass over it."""
        parts = [*self.forward.tensors().values(), *self.backward.tensors().values(), self.edge_ids]
        return checksum(self.num_sources, self.num_targets, self.num_user_edges, *parts)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CompressedGraph:
        """Return a copy on a device with all that is derived, or this where it is there already."""
        if (device := torch.empty(0, device=device).device) == self.device:
            return self

        def moved(value: Any) -> Any:
            return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value

        with _plain_tensors():
            forward = moved(self.forward)
            if self.shares_chunks:
                backward = replace(forward, edge_ids=moved(self.backward.edge_ids))
            else:
                backward = moved(self.backward)
            cache = {key: moved(value) for key, value in self.cache.items()}
            return replace(self, forward=forward, backward=backward, edge_ids=moved(self.edge_ids), cache=cache)

    def replace_settings(self, settings: PlanSettings) -> CompressedGraph:
        """Return the same graph, all tensors shared, with other settings for the ops."""
        cache = {
            key: value.replace_settings(settings) if isinstance(value, CompressedGraph) else value
            for key, value in self.cache.items()
        }
        return replace(self, settings=settings, cache=cache)

    def save(self, folder: str | Path) -> Path:
        """Write one ``.npy`` file per array and ``graph.json`` into a folder.

        Raises:
            FileExistsError: The folder holds a compressed graph already.
        """
        folder = Path(folder)
        if (folder / _META).exists():
            # The arrays may be mapped by someone, who would see them change.
            raise FileExistsError(f"{folder} holds a compressed graph already; choose another folder")
        tensors = {f"forward_{name}": tensor for name, tensor in self.forward.tensors().items()}
        if not self.shares_chunks:
            tensors |= {f"backward_{name}": tensor for name, tensor in self.backward.tensors().items()}
        tensors["backward_edge_ids"] = self.backward.edge_ids
        tensors |= {"edge_ids": self.edge_ids, "weight_ids": self.cache.get("weight_ids")}
        save_arrays(folder, tensors)
        meta = {
            "format": _FORMAT,
            "num_sources": self.num_sources,
            "num_targets": self.num_targets,
            "num_user_edges": self.num_user_edges,
            "order": self.order,
            "backward_order": self.backward_order,
            "settings": asdict(self.settings),
            "limits": None if self.limits is None else asdict(self.limits),
            "arrays": sorted(name for name, tensor in tensors.items() if tensor is not None),
        }
        # Last: without it an interrupted save is no graph.
        write_whole(folder / _META, json.dumps(meta, indent=1))
        return folder

    @classmethod
    def load(cls, folder: str | Path, mmap: bool = True) -> CompressedGraph:
        """Read what :meth:`save` wrote; the content of every array is checked.

        Args:
            folder: The folder.
            mmap: Leave the arrays on disk and let the system page them in; writes never reach the files.

        Raises:
            FileNotFoundError: The folder lacks a file.
            ValueError: A file is truncated, or no part of a compressed graph.
        """
        return read_compressed(folder, mmap)

    def _check_square(self, what: str) -> None:
        if self.num_sources != self.num_targets:
            raise ValueError(
                f"{what} must have the same vertices on both sides, but the graph has {self.num_sources} sources and "
                f"{self.num_targets} targets"
            )

    def check_edge_values(self, values: Tensor, name: str) -> None:
        """Raise a ValueError unless there is one value per edge of the user's; ``name`` is for the message."""
        if values.dim() < 1 or values.size(0) != self.num_user_edges:
            raise ValueError(
                f"{name} must have one entry per edge of the graph, {self.num_user_edges}, but has the shape "
                f"{list(values.shape)}"
            )

    def _derived(self, name: str, function: Callable[[], T]) -> T:
        if name not in self.cache:
            with _plain_tensors():
                self.cache[name] = function()
        value: T = self.cache[name]
        return value

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_sources={self.num_sources}, num_targets={self.num_targets}, "
            f"num_edges={self.num_edges}, num_chunks={self.num_chunks}, order={self.order!r})"
        )


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make tensors that autograd can save also inside ``inference_mode``, where validation may ask for them first."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def read_compressed(folder: str | Path, mmap: bool = True, check: bool = True) -> CompressedGraph:
    """Read what :meth:`CompressedGraph.save` wrote.

    Args:
        check: Look at the content of every array, not only at dtypes and lengths; without it, it must be known.
    """
    folder = Path(folder)
    path = folder / _META
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: {folder} holds no compressed graph")
    try:
        meta = read_json(read_text(path))
        if meta["format"] != _FORMAT:
            raise ValueError(f"its format is {meta['format']!r}, not {_FORMAT!r}")
        num_sources, num_targets, num_user_edges = (
            int(meta[name]) for name in ("num_sources", "num_targets", "num_user_edges")
        )
        settings = PlanSettings(**meta["settings"])
        limits = None if meta["limits"] is None else Limits(**meta["limits"])
        names = list(meta["arrays"])
        order, backward_order = orders = meta["order"], meta["backward_order"]
        if not set(orders) <= {"locality", "natural"}:
            raise ValueError(f"its orders are {orders}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not describe a compressed graph ({error}); compress the graph again") from error
    arrays = {name: load_array(folder / f"{name}.npy", mmap) for name in names}
    edge_ids, back_ids, weight_ids = (arrays.get(name) for name in ("edge_ids", "backward_edge_ids", "weight_ids"))
    try:
        forward = Chunks.from_arrays(arrays, "forward_", num_targets, num_sources, check)
        backward = replace(forward, edge_ids=back_ids)
        if "backward_local" in arrays:
            backward = Chunks.from_arrays(arrays, "backward_", num_sources, num_targets, check)
        num_edges = forward.num_edges
        if backward.num_edges != num_edges:
            raise ValueError("the directions have different numbers of edges")
        if back_ids is None:
            raise ValueError("backward_edge_ids is missing")
        if check:
            check_places(back_ids, num_edges, 0, num_edges, "backward_edge_ids")
            for name, ids in (("edge_ids", edge_ids), ("weight_ids", weight_ids)):
                if ids is not None:
                    check_places(ids, num_edges, -1, num_user_edges, name)
    except ValueError as error:
        raise ValueError(f"{folder} does not hold a compressed graph: {error}; compress the graph again") from error
    cache = {} if weight_ids is None else {"weight_ids": weight_ids}
    return CompressedGraph(forward, backward, edge_ids, settings, order, backward_order, limits, num_user_edges, cache)

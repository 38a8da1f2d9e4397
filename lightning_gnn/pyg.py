"""Lets PyG's own neighbour loaders run on our samplers: opt-in, and undone without a trace."""

from __future__ import annotations

import threading
import warnings
from types import TracebackType
from typing import Any, ClassVar, Literal

import torch
import torch_geometric.typing
from torch import Tensor
from torch.utils.data import get_worker_info
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.data.lightning import datamodule
from torch_geometric.loader import link_neighbor_loader, neighbor_loader
from torch_geometric.sampler import NeighborSampler as PyGNeighborSampler
from torch_geometric.sampler import NodeSamplerInput, SamplerOutput
from torch_geometric.sampler.base import DataType, SubgraphType

from lightning_gnn.graph.csc import CSCGraph, check_edge_index
from lightning_gnn.ops import batch_key
from lightning_gnn.ops.sample.definition import check_fanouts, check_flags
from lightning_gnn.persistent.sampler import PersistentNeighborSampler
from lightning_gnn.sampling.neighbor import NeighborSampler, ProcessRank, check_untyped

_MODULES = (neighbor_loader, link_neighbor_loader, datamodule)


def enable_pyg_sampling() -> PyGSampling:
    """Make PyG's ``NeighborLoader`` and ``LinkNeighborLoader``, and its Lightning data modules, use our sampler.

    It holds for loaders that are made from now on, in this process, until the handle is disabled; use the handle as a
    context manager to limit it to a block. A loader keeps the sampler that it was made with, so one made while this was
    enabled goes on working afterwards (but a Lightning ``Trainer`` can make loaders anew, for several devices: leave it
    enabled while one runs). Enabling twice is fine: it ends when every handle is disabled.

    Homogeneous graphs are sampled by us, without pyg-lib: on the GPU where ``data.edge_index`` lies on one, else (and
    in worker processes) on the CPU. The random numbers come from torch's global generator, as PyG's do.
    Heterogeneous graphs stay with PyG's sampler, where pyg-lib or torch-sparse is installed.

    Returns:
        A handle with ``disable()``.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from torch_geometric.loader import NeighborLoader
        >>> from lightning_gnn import enable_pyg_sampling
        >>> path = Data(edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]), num_nodes=5)
        >>> with enable_pyg_sampling():
        ...     loader = NeighborLoader(path, num_neighbors=[1, 1], input_nodes=torch.tensor([4]))
        >>> next(iter(loader)).n_id
        tensor([4, 3, 2])
    """
    return PyGSampling()


class PyGSampling:
    """The handle of :func:`enable_pyg_sampling`; as a context manager it disables at the end of the block."""

    _lock = threading.Lock()
    _enabled: ClassVar[set[PyGSampling]] = set()
    _originals: ClassVar[dict[Any, type]] = {}

    def __init__(self) -> None:
        self._enable()

    def disable(self) -> None:
        """End this opt-in; a second call changes nothing. PyG's own sampler is back when no other handle is left."""
        with self._lock:
            self._enabled.discard(self)
            if self._enabled:
                return
            while self._originals:
                module, original = self._originals.popitem()
                # Someone else may have put a sampler of their own in its place since.
                if module.NeighborSampler is LoaderNeighborSampler:
                    module.NeighborSampler = original

    def _enable(self) -> None:
        with self._lock:
            self._enabled.add(self)
            for module in _MODULES:
                if module.NeighborSampler is not LoaderNeighborSampler:
                    self._originals[module] = module.NeighborSampler
                    module.NeighborSampler = LoaderNeighborSampler

    def __enter__(self) -> PyGSampling:
        self._enable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.disable()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'enabled' if self in self._enabled else 'disabled'})"


class LoaderNeighborSampler(PyGNeighborSampler):  # type: ignore[misc]
    """What PyG's loaders make in place of PyG's ``NeighborSampler``; takes the same arguments.

    Only the picking of neighbours is replaced. Negative edges, labels and the conversion to bidirectional subgraphs are
    PyG's own code. ``edge`` of its output holds positions in the user's ``edge_index``.

    Args:
        data: A homogeneous graph, or PyG's (feature store, graph store) of one; others are left to PyG's sampler.
        num_neighbors: In-edges to pick per node, one number per hop; -1 takes all.
        subgraph_type: ``"directional"``, ``"bidirectional"`` or ``"induced"``.
        replace: Draw with replacement.
        disjoint: One tree per seed, told apart by ``batch``.
        temporal_strategy: Without effect, as there are no times.
        time_attr: Not supported.
        weight_attr: Not supported.
        is_sorted: Not needed: the order of the edges is looked at.
        share_memory: Move the topology into shared memory, for loaders with worker processes.
        directed: PyG's deprecated way to ask for induced subgraphs.
        sample_direction: ``"forward"``.

    Raises:
        TypeError: Fanouts or an ``edge_index`` that are no integers.
        NotImplementedError: Temporal, weighted or backward sampling.
        ValueError: Another option or a kind of graph that is not supported, or a graph that is not valid.
    """

    def __init__(
        self,
        data: Data | HeteroData | tuple[FeatureStore, GraphStore],
        num_neighbors: Any,
        subgraph_type: SubgraphType | str = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        is_sorted: bool = False,
        share_memory: bool = False,
        directed: bool = True,
        sample_direction: Literal["forward", "backward"] = "forward",
    ) -> None:
        self.graph: CSCGraph | None = None
        self.data_type = DataType.from_data(data)
        if sample_direction not in ("forward", "backward"):
            raise ValueError(f"unknown sample_direction {sample_direction!r}; choose one of forward, backward")
        if sample_direction == "backward" and time_attr is not None:  # for no kind of graph, as in PyG
            raise NotImplementedError(f"temporal sampling cannot go backward: leave out time_attr={time_attr!r}")
        if _is_hetero(data):
            if not (torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE):
                raise ValueError(
                    "heterogeneous graphs are not supported here, and PyG's own sampler for them needs pyg-lib: "
                    "install it, or convert the graph with data.to_homogeneous()"
                )
            super().__init__(
                data, num_neighbors, subgraph_type, replace, disjoint, temporal_strategy, time_attr, weight_attr,
                is_sorted, share_memory, directed, sample_direction,
            )  # fmt: skip
            return
        if not directed:
            warnings.warn("'directed' is deprecated; use subgraph_type='induced' instead", stacklevel=3)
            subgraph_type = SubgraphType.induced
        self.sample_direction = sample_direction
        self.time_attr = time_attr
        self.weight_attr = weight_attr
        self.temporal_strategy = temporal_strategy
        self.num_neighbors = num_neighbors
        self.replace = replace
        self.disjoint = disjoint
        self.subgraph_type = subgraph_type
        self.keep_orig_edges = False
        self.node_time = self.edge_time = self.edge_weight = self.perm = None
        self.edge_types = [None]
        self._rank = ProcessRank()
        self._checked_fanouts()
        self.graph = _topology(data) if isinstance(data, Data) else _stored_topology(data[1])
        self.num_nodes = self.graph.num_nodes
        edges = data.get("edge_index") if isinstance(data, Data) else None
        self.device = edges.device if isinstance(edges, Tensor) and edges.device.type == "cuda" else None
        self._on_device: PersistentNeighborSampler | None = None
        if share_memory:
            self.graph.share_memory_()

    def __getstate__(self) -> dict[str, Any]:
        # What samples on a GPU cannot be sent to a worker process, which samples on its CPU.
        return {**self.__dict__, "_on_device": None}

    @property
    def subgraph_type(self) -> SubgraphType:
        """Which edges between the sampled nodes a mini-batch has."""
        return self._subgraph_type

    @subgraph_type.setter
    def subgraph_type(self, value: SubgraphType | str) -> None:
        # LightningNodeData sets the options of its evaluation loaders as they are, and PyG compares with the enum.
        try:
            self._subgraph_type = SubgraphType(value)
        except ValueError:
            kinds = ", ".join(kind.value for kind in SubgraphType)
            raise ValueError(f"unknown subgraph_type {value!r}; choose one of {kinds}") from None

    def _checked_fanouts(self) -> list[int]:
        check_flags(replace=self.replace, disjoint=self.disjoint)
        if self.temporal_strategy not in ("uniform", "last"):
            raise ValueError(f"unknown temporal_strategy {self.temporal_strategy!r}; choose one of uniform, last")
        if self.time_attr is not None:
            raise NotImplementedError(f"temporal sampling is not supported: leave out time_attr={self.time_attr!r}")
        if self.weight_attr is not None:
            raise NotImplementedError(f"weighted sampling is not supported: leave out weight_attr={self.weight_attr!r}")
        if self.sample_direction != "forward":
            raise NotImplementedError(
                f"sample_direction={self.sample_direction!r} is not supported: sample forward on the graph with "
                "edge_index.flip(0)"
            )
        if self.disjoint and self.subgraph_type == SubgraphType.induced:
            raise ValueError("disjoint=True has no induced subgraphs: use subgraph_type='directional'")
        fanouts = self.num_neighbors.get_mapped_values()
        if isinstance(fanouts, dict):
            raise ValueError(
                f"num_neighbors by edge type, {fanouts!r}, needs a heterogeneous graph: give one list, a fanout per hop"
            )
        return [] if hasattr(fanouts, "__len__") and not len(fanouts) else check_fanouts(fanouts)

    def _sample(self, seed: Any, seed_time: Any = None, **kwargs: Any) -> Any:
        if self.graph is None:
            return super()._sample(seed, seed_time, **kwargs)
        if seed_time is not None:
            raise NotImplementedError(
                "temporal sampling is not supported: leave out input_time and edge_label_time (times of the seeds)"
            )
        check_untyped(seed)
        fanouts = self._checked_fanouts()
        # A mini-batch without hops has its seeds alone.
        out = self._pick(seed, fanouts or [0])
        if not fanouts:
            out.num_sampled_nodes, out.num_sampled_edges = out.num_sampled_nodes[:1], []
        if self.subgraph_type == SubgraphType.induced:
            return self._induce(out)
        return out

    def _pick(self, seeds: Tensor, fanouts: list[int], replace: bool | None = None) -> SamplerOutput:
        assert self.graph is not None
        replace = self.replace if replace is None else replace
        sampler: NeighborSampler
        # Worker processes cannot use the parent's GPU.
        if self.device is not None and get_worker_info() is None:
            if self._on_device is None:
                self._on_device = PersistentNeighborSampler(self.graph, fanouts, seed=0, device=self.device)
            sampler = self._on_device.with_options(num_neighbors=fanouts, replace=replace, disjoint=self.disjoint)
        else:
            sampler = NeighborSampler(self.graph, fanouts, replace=replace, disjoint=self.disjoint, seed=0)
        return sampler.sample_from_nodes(NodeSamplerInput(None, seeds), key=self._next_key())

    def _next_key(self) -> int:
        """Draw the key of a mini-batch from torch's global stream: each worker process has a new one in each epoch."""
        return batch_key(int(torch.randint(2**63 - 1, (), device="cpu")), rank=self._rank.get())

    def _induce(self, out: SamplerOutput) -> SamplerOutput:
        """Replace the sampled edges by all that the graph has between the sampled nodes."""
        whole = self._pick(out.node, [-1], replace=False)
        inside = whole.row < out.node.numel()
        return SamplerOutput(
            node=out.node, row=whole.row[inside], col=whole.col[inside], edge=whole.edge[inside], batch=out.batch
        )


def _is_hetero(data: Data | HeteroData | tuple[FeatureStore, GraphStore]) -> bool:
    if isinstance(data, tuple | list):
        return any(attr.edge_type is not None for attr in data[1].get_all_edge_attrs())
    return isinstance(data, HeteroData)


def _topology(data: Data) -> CSCGraph:
    """Take the topology from what PyG's loaders cut the edges of a mini-batch out of."""
    if data.get("adj") is not None:
        raise ValueError("data.adj is not supported: use data.edge_index")
    adj_t = data.get("adj_t")
    if isinstance(adj_t, Tensor):
        raise ValueError(
            f"PyG's loaders cannot cut mini-batches out of an adj_t of the layout {adj_t.layout}: use data.edge_index"
        )
    if adj_t is not None:
        return CSCGraph.from_data(Data(adj_t=adj_t.cpu()))
    edge_index = data.get("edge_index")
    if edge_index is None:
        if data.get("graph") is not None:
            raise ValueError("PyG's loaders need data.edge_index: for data.graph use the loaders of lightning_gnn")
        edge_index = torch.empty((2, 0), dtype=torch.int64)
    check_edge_index(edge_index)
    return CSCGraph.from_edge_index(edge_index.as_subclass(Tensor), data.num_nodes)


def _stored_topology(store: GraphStore) -> CSCGraph:
    num_nodes = max(size for attr in store.get_all_edge_attrs() for size in attr.size)
    row, colptr, perm = store.csc()
    missing = num_nodes + 1 - colptr.numel()
    return CSCGraph.from_csc(torch.cat([colptr, colptr[-1:].expand(missing)]), row, perm)

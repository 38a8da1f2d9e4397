"""Lets PyG's own neighbor loaders run on our samplers: opt-in, and undone without a trace."""

from __future__ import annotations

import copy
import threading
import warnings
from types import TracebackType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, remote_backend_utils
from torch_geometric.data.lightning import datamodule
from torch_geometric.index import ptr2index
from torch_geometric.loader import link_neighbor_loader, neighbor_loader
from torch_geometric.sampler import NeighborSampler as PyGNeighborSampler
from torch_geometric.sampler.base import DataType, SubgraphType
from torch_geometric.sampler.utils import reverse_edge_type

from lightning_gnn.gpu_sampling.sampler import PersistentNeighborSampler
from lightning_gnn.graph.csc import CSCGraph, check_edge_index
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.ops import batch_key
from lightning_gnn.ops.sample.definition import check_fanouts
from lightning_gnn.sampling.edge_attributes import NodeTime, with_times, with_weights
from lightning_gnn.sampling.neighbor import NeighborSampler, Output, ProcessRank, fanouts_in, known_subgraph_type

_MODULES = (neighbor_loader, link_neighbor_loader, datamodule)


def enable_pyg_sampling() -> PyGSampling:
    """Make PyG's ``NeighborLoader`` and ``LinkNeighborLoader``, and its Lightning data modules, use our sampler.

    It holds for loaders that are made from now on, in this process, until the handle is disabled; use the handle as a
    context manager to limit it to a block. A loader keeps the sampler that it was made with (but a Lightning
    ``Trainer`` can make loaders again, for several devices: leave it enabled while one runs). Enabling twice is fine:
    it ends when every handle is disabled.

    Graphs of one type and of several, with times and with weights, are sampled by us, without pyg-lib: on the GPU where
    all of their ``edge_index`` lie on one, all others (and in worker processes) on the CPU. The random numbers come
    from torch's global generator, as PyG's do. ``HGTLoader`` keeps PyG's own sampler.

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

    Negative edges, labels and bidirectional subgraphs are PyG's own code. ``edge`` of the output holds positions in the
    user's ``edge_index``. Edges of weight 0 are never picked, unlike in pyg-lib; ``is_sorted`` is not needed.
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
        self.data_type = DataType.from_data(data)
        if sample_direction not in ("forward", "backward"):
            raise ValueError(f"unknown sample_direction {sample_direction!r}; choose one of forward, backward")
        if sample_direction == "backward" and time_attr is not None:  # for no kind of graph, as in PyG
            raise NotImplementedError(f"temporal sampling cannot go backward: leave out time_attr={time_attr!r}")
        if not directed:
            warnings.warn("'directed' is deprecated; use subgraph_type='induced' instead", stacklevel=3)
            subgraph_type = SubgraphType.induced
        self.sample_direction = sample_direction
        self.time_attr, self.weight_attr = self._attributes = time_attr, weight_attr
        remote = self.data_type == DataType.remote
        if remote and weight_attr is not None:
            raise NotImplementedError(f"remote graphs have no weights: leave out weight_attr={weight_attr!r}")
        graph = _stored_topology(*data) if remote else _topology(data)
        if sample_direction == "backward":
            graph = _reversed(graph)
        graph, node_time = _stored_times(graph, data, time_attr) if remote else with_times(graph, data, time_attr)
        whole, graph = graph, with_weights(graph, None if remote else _forward(data, sample_direction), weight_attr)
        self.edge_types, self.node_types = [None], [None]
        if isinstance(graph, HeteroCSCGraph):
            self.node_types, self.edge_types = graph.node_types, graph.edge_types
            self.to_backward_edge_type = {reverse_edge_type(name): name for name in graph.edge_types}
        self.graph = graph
        self.num_nodes = graph.num_nodes
        self.node_time = node_time
        # PyG asks whether there are any.
        self.edge_time = True if graph.is_temporal and node_time is None else None
        self.edge_weight = self.perm = None
        self.temporal_strategy = temporal_strategy
        self.num_neighbors = num_neighbors
        self.replace = replace
        self.disjoint = disjoint
        self.subgraph_type = subgraph_type
        self.keep_orig_edges = False
        self._rank = ProcessRank()
        self.device = None if remote else gpu_of(data)
        self._on_device: PersistentNeighborSampler | None = None
        if share_memory:
            self.graph.share_memory_()
        self._sampler = NeighborSampler(self.graph, [1], seed=0)
        self._sampler.node_time, self._sampler.whole_graph = node_time, whole
        self._configured()

    def __getstate__(self) -> dict[str, Any]:
        # What samples on a GPU cannot be sent to a worker process, which samples on its CPU.
        return {**self.__dict__, "_on_device": None}

    @property
    def is_hetero(self) -> bool:
        """Whether the graph has types."""
        return isinstance(self.graph, HeteroCSCGraph)

    @property
    def subgraph_type(self) -> SubgraphType:
        """Which edges between the sampled nodes a mini-batch has."""
        return self._subgraph_type

    @subgraph_type.setter
    def subgraph_type(self, value: SubgraphType | str) -> None:
        # LightningNodeData sets the options of its evaluation loaders as they are, and PyG compares with the enum.
        self._subgraph_type = known_subgraph_type(value)

    def _fanouts(self) -> Any:
        if isinstance(self.graph, HeteroCSCGraph):
            return fanouts_in(self._num_neighbors, self.graph.edge_types)
        fanouts = self._num_neighbors.get_mapped_values()
        if isinstance(fanouts, dict):
            raise ValueError(
                f"num_neighbors by edge type, {fanouts!r}, needs a heterogeneous graph: give one list, a fanout per hop"
            )
        # A mini-batch without hops has its seeds alone.
        return [] if hasattr(fanouts, "__len__") and not len(fanouts) else check_fanouts(fanouts)

    def _configured(self) -> NeighborSampler:
        """Return our sampler with the options of now."""
        if (self.time_attr, self.weight_attr) != self._attributes:
            raise NotImplementedError("time_attr and weight_attr cannot be others for evaluation than for training")
        fanouts = self._fanouts()
        options = {
            "num_neighbors": fanouts if isinstance(fanouts, dict) else fanouts or [0],
            "replace": self.replace,
            "disjoint": self._disjoint,
            "subgraph_type": self.subgraph_type,
            "temporal_strategy": self.temporal_strategy,
        }
        if self.device is None or get_worker_info() is not None:  # worker processes cannot use the parent's GPU
            return self._sampler.with_options(**options)
        if self._on_device is None:
            self._on_device = PersistentNeighborSampler.of(self._sampler, device=self.device)
        self._on_device = self._on_device.with_options(**options)  # and keeps what these have copied there
        return self._on_device

    def _sample(self, seed: Any, seed_time: Any = None, **kwargs: Any) -> Output:
        # The key is drawn from torch's global stream: each worker process has a new one in each epoch.
        if isinstance(seed, Tensor) and not seed.numel():
            seed = seed.long()  # PyG's bidirectional sampler goes on with torch.tensor([])
        key = int(batch_key(int(torch.randint(2**63 - 1, (), device="cpu")), rank=self._rank.get()))
        out = self._configured()._sample(seed, seed_time, key)
        if isinstance(self.graph, CSCGraph) and not self._fanouts() and out.num_sampled_nodes is not None:
            out.num_sampled_nodes, out.num_sampled_edges = out.num_sampled_nodes[:1], []
        return _restored(out) if self.sample_direction == "backward" else out


def gpu_of(data: Data | HeteroData) -> torch.device | None:
    """Return the GPU on which all edges of a graph lie, None if they do not."""
    edges = [store.get("edge_index") for store in data.edge_stores]
    places = {each.device if isinstance(each, Tensor) else None for each in edges}
    place = places.pop() if len(places) == 1 else None
    return place if place is not None and place.type == "cuda" else None


def _topology(data: Data | HeteroData) -> CSCGraph | HeteroCSCGraph:
    """Take the topology from what PyG's loaders cut the edges of a mini-batch out of."""
    if isinstance(data, HeteroData):
        if alone := [store._key for store in data.edge_stores if "graph" in store and "edge_index" not in store]:
            raise ValueError(
                f"PyG's loaders need data[{alone[0]}].edge_index: for its graph use the loaders of lightning_gnn"
            )
        return HeteroCSCGraph.from_data(data)
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


def _stored_topology(features: FeatureStore, store: GraphStore) -> CSCGraph | HeteroCSCGraph:
    attributes = store.get_all_edge_attrs()
    row, colptr, perm = store.csc()
    if not any(attribute.edge_type is not None for attribute in attributes):
        return _padded(row, colptr, perm, max(size for attribute in attributes for size in attribute.size))
    names = {name for edge_type in colptr for name in (edge_type[0], edge_type[2])}
    names |= {a.group_name for a in features.get_all_tensor_attrs() if isinstance(a.group_name, str)}
    sizes = {name: remote_backend_utils.size(features, store, name) for name in names}
    relations = {
        name: _padded(row[name], colptr[name], perm.get(name), sizes[name[2]], sizes[name[0]]) for name in colptr
    }
    return HeteroCSCGraph.build(sizes, relations)


def _padded(
    row: Tensor, colptr: Tensor, perm: Tensor | None, num_nodes: int, num_sources: int | None = None
) -> CSCGraph:
    colptr = torch.cat([colptr, colptr[-1:].expand(num_nodes + 1 - colptr.numel())])
    if perm is None:
        return CSCGraph.from_csc(colptr, row, None, num_sources)
    # PyG sorts by target in no certain order: in that of the store, picks are those of the same edges in a Data.
    edge_index = row.new_empty((2, perm.numel()))
    edge_index[:, perm] = torch.stack([row, ptr2index(colptr)])
    return CSCGraph.from_edge_index(edge_index, num_nodes, num_sources)


def _stored_times(
    graph: CSCGraph | HeteroCSCGraph, data: Any, name: str | None
) -> tuple[CSCGraph | HeteroCSCGraph, NodeTime]:
    """Do what :func:`with_times` does, from the attributes of a feature store."""
    if name is None:
        return graph, None
    features: FeatureStore = data[0]
    found = {}
    for attribute in features.get_all_tensor_attrs():
        if attribute.attr_name == name:
            attribute = copy.copy(attribute)
            attribute.index = None
            found[attribute.group_name] = features.get_tensor(attribute)
    if isinstance(graph, HeteroCSCGraph):
        local = HeteroData()
        for group, time in found.items():
            local[group][name] = time
        return with_times(graph, local, name)
    if len(found) != 1:
        raise ValueError(f"the feature store has no times called {name!r}")
    (time,) = found.values()
    # As in PyG: this name alone means times of nodes.
    return (graph.with_source_time(time), time) if name == "time" else (graph.with_time(time), None)


def _reversed(graph: CSCGraph | HeteroCSCGraph) -> CSCGraph | HeteroCSCGraph:
    """Return the graph with all edges, and the names of their types, turned round."""
    if isinstance(graph, CSCGraph):
        return CSCGraph.from_edge_index(graph.to_edge_index().flip(0), graph.num_sources, graph.num_nodes)
    turned: Any = {reverse_edge_type(name): _reversed(relation) for name, relation in graph.relations.items()}
    return HeteroCSCGraph.build(graph.sizes, turned)


def _forward(data: Data | HeteroData, direction: str) -> Data | HeteroData:
    """Return what has the attributes of the edges under the names that they have in the sampled graph."""
    if direction == "forward" or isinstance(data, Data):
        return data
    turned = HeteroData()
    for store in data.edge_stores:
        turned[reverse_edge_type(store._key)].update(store)
    return turned


def _restored(out: Output) -> Output:
    """Turn a sample of the reversed graph round again."""

    def back(values: Any) -> Any:
        return (
            {reverse_edge_type(name): value for name, value in values.items()} if isinstance(values, dict) else values
        )

    out.row, out.col, out.edge = back(out.col), back(out.row), back(out.edge)
    out.num_sampled_edges = back(out.num_sampled_edges)
    return out

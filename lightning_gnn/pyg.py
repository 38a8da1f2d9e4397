"""Makes PyG's own neighbor loaders use this package's samplers: opt-in and reversible."""

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
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.ops import batch_key
from lightning_gnn.ops.sample.definition import check_fanouts
from lightning_gnn.sampling.edge_attributes import NodeTime, with_times, with_weights
from lightning_gnn.sampling.neighbor import NeighborSampler, Output, ProcessRank, fanouts_in, known_subgraph_type

_MODULES = (neighbor_loader, link_neighbor_loader, datamodule)


def enable_pyg_sampling() -> PyGSampling:
    """Make PyG's ``NeighborLoader``, ``LinkNeighborLoader`` and Lightning data modules use this package's sampler.

    Applies to loaders created in this process until the handle is disabled. Use the handle as a context manager to
    limit it to a block. A loader retains its sampler, but a Lightning ``Trainer`` may recreate loaders for several
    devices: leave it enabled while a Trainer runs. It may be enabled several times, and remains enabled until every
    handle is disabled.

    Supports homogeneous and heterogeneous graphs, also temporal and weighted ones, without pyg-lib. Sampling runs on
    the GPU if all ``edge_index`` tensors are on the same GPU, otherwise (and in worker processes) on the CPU. Random
    numbers come from torch's global generator, as in PyG. ``HGTLoader`` continues to use PyG's own sampler.

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
    """The handle of :func:`enable_pyg_sampling`; as a context manager, it is disabled at the end of the block."""

    _lock = threading.Lock()
    _enabled: ClassVar[set[PyGSampling]] = set()
    _originals: ClassVar[dict[Any, type]] = {}

    def __init__(self) -> None:
        self._enable()

    def disable(self) -> None:
        """Disable this handle (idempotent); disabling the last handle restores PyG's own sampler. Thread-safe."""
        with self._lock:
            self._enabled.discard(self)
            if self._enabled:
                return
            while self._originals:
                module, original = self._originals.popitem()
                # Do not overwrite a sampler that other code has installed meanwhile.
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
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.disable()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'enabled' if self in self._enabled else 'disabled'})"


class LoaderNeighborSampler(PyGNeighborSampler):  # type: ignore[misc]
    """Replacement for PyG's ``NeighborSampler`` in PyG's loaders, with the same arguments.

    Negative edges, labels and bidirectional subgraphs use PyG's own code. ``edge`` of the output has indices into the
    user's ``edge_index``. Unlike in pyg-lib, edges of weight 0 are never sampled; ``is_sorted`` is ignored.
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
        if sample_direction == "backward" and time_attr is not None:  # unsupported for all graphs, as in PyG
            raise NotImplementedError(f"temporal sampling cannot run backward: omit time_attr={time_attr!r}")
        if not directed:
            warnings.warn("'directed' is deprecated; use subgraph_type='induced' instead", stacklevel=3)
            subgraph_type = SubgraphType.induced
        self.sample_direction = sample_direction
        self.time_attr, self.weight_attr = self._attributes = time_attr, weight_attr
        is_remote = self.data_type == DataType.remote
        if is_remote and weight_attr is not None:
            raise NotImplementedError(f"remote graphs do not support weights: omit weight_attr={weight_attr!r}")
        graph = _read_remote_topology(*data) if is_remote else _read_topology(data)
        if sample_direction == "backward":
            graph = _reverse(graph)
        graph, node_time = _load_times(graph, data, time_attr) if is_remote else with_times(graph, data, time_attr)
        whole, edge_data = graph, None if is_remote else _rename_stores(data, sample_direction)
        graph = with_weights(whole, edge_data, weight_attr)
        self.edge_types, self.node_types = [None], [None]
        if isinstance(graph, HeteroCSCGraph):
            self.node_types, self.edge_types = graph.node_types, graph.edge_types
            self.to_backward_edge_type = {reverse_edge_type(name): name for name in graph.edge_types}
        self.graph = graph
        self.num_nodes = graph.num_nodes
        self.node_time = node_time
        # PyG only checks whether this is None.
        self.edge_time = True if graph.is_temporal and node_time is None else None
        self.edge_weight = self.perm = None
        self.temporal_strategy = temporal_strategy
        self.num_neighbors = num_neighbors
        self.replace = replace
        self.disjoint = disjoint
        self.subgraph_type = subgraph_type
        self.keep_orig_edges = False
        self._rank = ProcessRank()
        self.device = None if is_remote else find_graph_gpu(data)
        self._gpu_sampler: PersistentNeighborSampler | None = None
        if share_memory:
            self.graph.share_memory_()
        self._sampler = NeighborSampler(self.graph, [1], seed=0)
        self._sampler.node_time, self._sampler.whole_graph = node_time, whole
        self._configure()

    def __getstate__(self) -> dict[str, Any]:
        # A GPU sampler cannot be sent to a worker process, which samples on the CPU.
        return {**self.__dict__, "_gpu_sampler": None}

    @property
    def is_hetero(self) -> bool:
        """Whether the graph is heterogeneous."""
        return isinstance(self.graph, HeteroCSCGraph)

    @property
    def subgraph_type(self) -> SubgraphType:
        """Type of the sampled subgraph: which edges between the sampled nodes it includes."""
        return self._subgraph_type

    @subgraph_type.setter
    def subgraph_type(self, value: SubgraphType | str) -> None:
        # LightningNodeData assigns the user's string for its evaluation loaders, but PyG compares with the enum.
        self._subgraph_type = known_subgraph_type(value)

    def _fanouts(self) -> Any:
        if isinstance(self.graph, HeteroCSCGraph):
            return fanouts_in(self._num_neighbors, self.graph.edge_types)
        fanouts = self._num_neighbors.get_mapped_values()
        if isinstance(fanouts, dict):
            raise ValueError(
                f"num_neighbors by edge type, {fanouts!r}, needs a heterogeneous graph: give one list, a fanout per hop"
            )
        # Without hops, a mini-batch only has its seeds.
        return [] if hasattr(fanouts, "__len__") and not len(fanouts) else check_fanouts(fanouts)

    def _configure(self) -> NeighborSampler:
        """Return this package's sampler with the current options, which PyG may have changed."""
        if (self.time_attr, self.weight_attr) != self._attributes:
            raise NotImplementedError("time_attr and weight_attr cannot differ between training and evaluation")
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
        if self._gpu_sampler is None:
            self._gpu_sampler = PersistentNeighborSampler.of(self._sampler, device=self.device)
        self._gpu_sampler = self._gpu_sampler.with_options(**options)  # retains the graph's copy on the GPU
        return self._gpu_sampler

    def _sample(self, seed: Any, seed_time: Any = None, **kwargs: Any) -> Output:
        # The key comes from torch's global generator, which PyTorch seeds differently per worker process and epoch.
        if isinstance(seed, Tensor) and not seed.numel():
            seed = seed.long()  # PyG's bidirectional sampler passes torch.tensor([]), which has a float dtype
        key = int(batch_key(int(torch.randint(2**63 - 1, (), device="cpu")), rank=self._rank.get()))
        out = self._configure()._sample(seed, seed_time, key)
        if isinstance(self.graph, CSCGraph) and not self._fanouts() and out.num_sampled_nodes is not None:
            out.num_sampled_nodes, out.num_sampled_edges = out.num_sampled_nodes[:1], []
        return _reverse_output(out) if self.sample_direction == "backward" else out


def find_graph_gpu(data: Data | HeteroData) -> torch.device | None:
    """Return the GPU that stores all edge_index tensors of a graph, or None."""
    edges = [store.get("edge_index") for store in data.edge_stores]
    devices = {each.device if isinstance(each, Tensor) else None for each in edges}
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and device.type == "cuda" else None


def _read_topology(data: Data | HeteroData) -> CSCGraph | HeteroCSCGraph:
    """Build the topology from the same attribute from which PyG's loaders select a mini-batch's edges."""
    if isinstance(data, HeteroData):
        if missing := [store._key for store in data.edge_stores if "graph" in store and "edge_index" not in store]:
            raise ValueError(
                f"PyG's loaders need data[{missing[0]}].edge_index: for its graph use the loaders of lightning_gnn"
            )
        if sparse := [store for store in data.edge_stores if isinstance(store.get("adj_t"), Tensor)]:
            name, layout = f"data[{sparse[0]._key}]", sparse[0].adj_t.layout
            raise ValueError(f"PyG's loaders cannot slice an adj_t with the layout {layout}: use {name}.edge_index")
        return HeteroCSCGraph.from_data(data)
    if data.get("adj") is not None:
        raise ValueError("data.adj is not supported: use data.edge_index")
    adj_t = data.get("adj_t")
    if isinstance(adj_t, Tensor):
        raise ValueError(f"PyG's loaders cannot slice an adj_t with the layout {adj_t.layout}: use data.edge_index")
    if adj_t is not None:
        return CSCGraph.from_data(Data(adj_t=adj_t.cpu()))
    edge_index = data.get("edge_index")
    if edge_index is None:
        if data.get("graph") is not None:
            raise ValueError("PyG's loaders need data.edge_index: for data.graph use the loaders of lightning_gnn")
        edge_index = torch.empty((2, 0), dtype=torch.int64)
    return CSCGraph.from_edge_index(edge_index, data.num_nodes)


def _read_remote_topology(features: FeatureStore, store: GraphStore) -> CSCGraph | HeteroCSCGraph:
    attributes = store.get_all_edge_attrs()
    row, colptr, perm = store.csc()
    if not any(attribute.edge_type is not None for attribute in attributes):
        return _build_graph(row, colptr, perm, max(size for attribute in attributes for size in attribute.size))
    names = {name for edge_type in colptr for name in (edge_type[0], edge_type[2])}
    names |= {a.group_name for a in features.get_all_tensor_attrs() if isinstance(a.group_name, str)}
    sizes = {name: remote_backend_utils.size(features, store, name) for name in names}
    relations = {
        name: _build_graph(row[name], colptr[name], perm.get(name), sizes[name[2]], sizes[name[0]]) for name in colptr
    }
    return HeteroCSCGraph.build(sizes, relations)


def _build_graph(
    row: Tensor, colptr: Tensor, perm: Tensor | None, num_nodes: int, num_sources: int | None = None
) -> CSCGraph:
    colptr = torch.cat([colptr, colptr[-1:].expand(num_nodes + 1 - colptr.numel())])
    if perm is None:
        return CSCGraph.from_csc(colptr, row, None, num_sources)
    # PyG's sort by target is not stable. Restore the store's edge order, to get the same samples as from a Data.
    edge_index = row.new_empty((2, perm.numel()))
    edge_index[:, perm] = torch.stack([row, ptr2index(colptr)])
    return CSCGraph.from_edge_index(edge_index, num_nodes, num_sources)


def _load_times(
    graph: CSCGraph | HeteroCSCGraph, data: Any, name: str | None
) -> tuple[CSCGraph | HeteroCSCGraph, NodeTime]:
    """Add node or edge times as :func:`with_times` does, but from a feature store."""
    if name is None:
        return graph, None
    features: FeatureStore = data[0]
    times = {}
    for attribute in features.get_all_tensor_attrs():
        if attribute.attr_name == name:
            attribute = copy.copy(attribute)
            attribute.index = None
            times[attribute.group_name] = features.get_tensor(attribute)
    if isinstance(graph, HeteroCSCGraph):
        local = HeteroData()
        for group, time in times.items():
            local[group][name] = time
        return with_times(graph, local, name)
    if len(times) != 1:
        raise ValueError(f"the feature store has no times called {name!r}")
    (time,) = times.values()
    # As in PyG, only the name "time" means node times; all others are edge times.
    return (graph.with_source_time(time), time) if name == "time" else (graph.with_time(time), None)


def _reverse(graph: CSCGraph | HeteroCSCGraph) -> CSCGraph | HeteroCSCGraph:
    """Return the graph with reversed edges and edge type names."""
    if isinstance(graph, CSCGraph):
        return CSCGraph.from_edge_index(graph.to_edge_index().flip(0), graph.num_sources, graph.num_nodes)
    relations: Any = {reverse_edge_type(name): _reverse(relation) for name, relation in graph.relations.items()}
    return HeteroCSCGraph.build(graph.sizes, relations)


def _rename_stores(data: Data | HeteroData, direction: str) -> Data | HeteroData:
    """Return the edge attributes under the edge types of the sampled graph."""
    if direction == "forward" or isinstance(data, Data):
        return data
    renamed = HeteroData()
    for store in data.edge_stores:
        renamed[reverse_edge_type(store._key)].update(store)
    return renamed


def _reverse_output(out: Output) -> Output:
    """Convert a sample of the reversed graph to the original direction."""

    def reverse_keys(values: Any) -> Any:
        return (
            {reverse_edge_type(name): value for name, value in values.items()} if isinstance(values, dict) else values
        )

    out.row, out.col, out.edge = reverse_keys(out.col), reverse_keys(out.row), reverse_keys(out.edge)
    out.num_sampled_edges = reverse_keys(out.num_sampled_edges)
    return out

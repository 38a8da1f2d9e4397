"""PGSampler: multi-hop neighbor sampling on a GPU in one launch per mini-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace as changed
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NegativeSampling, SamplerOutput
from torch_geometric.sampler.base import NumNeighbors, SubgraphType

from lightning_gnn.features.memory_pool import check_place, choose_place, pinned
from lightning_gnn.gpu_sampling.shards import LIST_SHIFT, LocalMachine, PeerShards
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.ops import NeighborSample, gather_rows
from lightning_gnn.ops.library import runs_triton
from lightning_gnn.ops.sample.definition import check_seeds
from lightning_gnn.ops.sample.triton import begin_samples, most_batches, relation_sampler, triton_sampler
from lightning_gnn.runtime.devices import to_device_async
from lightning_gnn.runtime.lightning import rank_zero_warn
from lightning_gnn.runtime.messages import whole_number
from lightning_gnn.sampling.edge_attributes import NodeTime
from lightning_gnn.sampling.neighbor import Fanouts, NeighborSampler, Output, nonuniform_features

MODES = ("fused", "persistent")
WARPS = (1, 2, 4, 8, 16, 32)
START_EDGES = 1 << 22  # initial scratch memory of the kernels, in edges (DeviceSampler.START_EDGES)
GraphT = TypeVar("GraphT", CSCGraph, HeteroCSCGraph)


class PersistentNeighborSampler(NeighborSampler):
    """Neighbor sampling on a GPU, with the mini-batches of :class:`NeighborSampler`.

    All hops of a mini-batch run in one launch, and the host synchronizes once, to read the sizes. Without a GPU, it
    warns and samples identical mini-batches on the CPU.

    Args:
        data, num_neighbors, replace, disjoint, seed: As for :class:`NeighborSampler`.
        device: Device for sampling; by default the current GPU.
        topology: ``"device"`` copies the graph to the GPU; ``"pinned"`` copies it to page-locked host memory, which the
            kernel reads over PCIe; ``"auto"`` selects ``"device"`` if that takes at most half of the free memory.
        mode: ``"fused"`` (hop by hop with grid barriers) or ``"persistent"`` (a task queue, for uniform sampling of
            homogeneous graphs; all else runs hop by hop). The samples are equal.
        fetch_size: Number of tasks that a program of the queue claims at a time.
        num_warps: Warps of 32 threads per program of the kernels, a power of two up to 32.
        programs_per_sm: Most programs per multiprocessor, up to 16; fewer where registers or threads do not suffice.
        hot_nodes: Nodes with adjacency lists to cache on the device if the topology is pinned.
        **options: Times, weights, LABOR, ``semantics``, subgraph types and ``exclude_seed_edges``, as for
            :class:`NeighborSampler`. ``semantics="every_hop"`` runs hop by hop in one launch, in either mode.
            Induced subgraphs with weights need two copies of the graph, with and without weights.

    Raises:
        TypeError, ValueError: :class:`NeighborSampler` rejects an argument, or topology, mode or fetch size is invalid.
        RuntimeError: Page-locked memory cannot be allocated; the message has the sizes.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from torch_geometric.sampler import NodeSamplerInput
        >>> from lightning_gnn import PersistentNeighborSampler
        >>> path = Data(edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]), num_nodes=5)
        >>> sampler = PersistentNeighborSampler(path, num_neighbors=[1, 1])  # on the CPU if the machine has no GPU
        >>> out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([4])))
        >>> out.node.tolist(), out.edge.tolist(), out.num_sampled_nodes
        ([4, 3, 2], [3, 2], [1, 1, 1])

    Source: PGSampler, sections III and IV. The termination test and the order of nodes and edges are our own.
    """

    def __init__(
        self,
        data: Data | HeteroData | CSCGraph | HeteroCSCGraph,
        num_neighbors: Fanouts | NumNeighbors,
        replace: bool = False,
        disjoint: bool = False,
        seed: int | None = None,
        *,
        device: torch.device | str | None = None,
        topology: str = "auto",
        mode: str = "fused",
        fetch_size: int = 128,
        num_warps: int = 8,
        programs_per_sm: int = 4,
        hot_nodes: Tensor | None = None,
        **options: Any,
    ) -> None:
        if "backend" in options:
            raise TypeError(f"unknown option backend for {type(self).__name__}; use it with NeighborSampler")
        super().__init__(data, num_neighbors, replace, disjoint, seed, **options)
        launch = check_launch(mode, fetch_size, num_warps, programs_per_sm)
        self._place(device, topology, hot_nodes, **launch)

    @classmethod
    def of(cls, sampler: NeighborSampler, **options: Any) -> PersistentNeighborSampler:
        """Convert a CPU sampler to the GPU; ``topology="shard"`` shards its edges across the GPUs of ``machine``."""
        other = cls.__new__(cls)
        other.__dict__.update(vars(sampler))
        other._place(**options)
        return other

    def _place(
        self,
        device: torch.device | str | None = None,
        topology: str = "auto",
        hot_nodes: Tensor | None = None,
        machine: LocalMachine | None = None,
        start_edges: int = START_EDGES,  # edges per launch that the first scratch memory has room for
        **launch_options: Any,
    ) -> None:
        """Copy the graph to the memory that its placement selects."""
        check_place(topology, "topology")
        if topology == "shard" and machine is None:
            raise ValueError("topology='shard' needs the other GPUs' processes: use PersistentSamplerDataModule")
        launch = check_launch(**launch_options) | {"start_edges": start_edges}
        host, whole = self.graph, self.whole_graph
        plain = isinstance(host, CSCGraph) and host.time is None and host.weight is None
        if hot_nodes is not None and not plain:
            raise ValueError("hot_nodes is only for homogeneous graphs without times and weights: leave it out")
        self._kernel: Any = None
        self._topology: str | None = None  # placement of the edges; None without a GPU
        self._edge_ids: PeerShards | None = None
        self.device = find_gpu(device)
        if self.device is None:
            rank_zero_warn("No GPU for the persistent sampler: sampling the same mini-batches on the CPU.")
            return
        self.backend = "triton"
        if machine is not None and topology == "shard":
            self._shard(machine, launch)
            return
        self._topology = choose_place(topology, host.num_bytes, self.device, "the topology")
        self.graph = self._copy_graph(host)
        if isinstance(whole, HeteroCSCGraph):  # both graphs share the edge types without weights
            whole = whole.map_relations(
                lambda name, part: self.graph.relations[name] if part is host.relations[name] else part
            )
        self.whole_graph = self.graph if self.whole_graph is host else whole
        self._place_whole()
        hot = None
        if self._topology == "pinned" and hot_nodes is not None:
            hot = host.cache_adjacency(hot_nodes, self.device)
        if plain:
            launch["every_hop"] = self.semantics == "every_hop"
            self._kernel = triton_sampler(self.graph.indptr, self.graph.indices, self.device, cached=hot, **launch)
        sizes = [host.num_nodes] if isinstance(host, CSCGraph) else list(host.sizes.values())
        warps = {name: launch[name] for name in ("num_warps", "programs_per_sm")}
        relation_sampler(self.graph, sizes, torch.empty(0, device=self.device).device, **warps)  # with its index

    def _shard(self, machine: LocalMachine, launch: dict[str, Any]) -> None:
        """Shard the edges across the GPUs of a machine, and replicate the offsets, which are read first."""
        host, self._topology = self.graph, "shard"
        assert self.device is not None
        check_shardable(self)
        indptr, sources = host.indptr.to(self.device), machine.share(host.indices.view(-1, 1), LIST_SHIFT)
        self.graph = self.whole_graph = changed(host, indptr=indptr)
        if host.edge_ids is not None:
            self._edge_ids = machine.share(host.edge_ids.view(-1, 1), LIST_SHIFT)
        self._kernel = triton_sampler(indptr, sources.local.view(-1), self.device, shards=sources, **launch)

    def _copy_graph(self, graph: GraphT) -> GraphT:
        """Return a copy of a graph in device or pinned memory."""
        assert self.device is not None
        if isinstance(graph, HeteroCSCGraph):
            return graph.map_relations(lambda _, relation: self._copy_graph(relation))
        if self._topology == "device":
            return graph.to(self.device)
        # The offsets are small and read first; their device also selects the device for sampling.
        in_host_memory = pinned(graph, graph.num_bytes, self.device, "the topology")
        return changed(in_host_memory, indptr=in_host_memory.indptr.to(self.device))

    def _place_whole(self) -> None:
        """Copy the complete graph too, if induced subgraphs need edges that sampling may not pick."""
        if self.device is None or self.subgraph_type != SubgraphType.induced or self._is_placed(self.whole_graph):
            return
        whole = self.whole_graph
        if isinstance(whole, HeteroCSCGraph):  # edge types without weights have been copied already
            self.whole_graph = whole.map_relations(
                lambda _, relation: relation if self._is_placed(relation) else self._copy_graph(relation)
            )
        else:
            self.whole_graph = self._copy_graph(whole)

    def _is_placed(self, graph: CSCGraph | HeteroCSCGraph) -> bool:
        assert self.device is not None
        relations = graph.relations.values() if isinstance(graph, HeteroCSCGraph) else [graph]
        return {relation.indptr.device.type for relation in relations} <= {self.device.type}

    def with_options(self, **options: object) -> PersistentNeighborSampler:
        """Return a sampler over the same graph with some attributes changed, such as ``num_neighbors``."""
        other = super().with_options(**options)
        assert isinstance(other, PersistentNeighborSampler)
        if self._kernel is not None and other.semantics != self.semantics:
            raise ValueError("semantics belongs to the kernel of a placed sampler: create another sampler with it")
        if other._topology == "shard":
            check_shardable(other)
        other._place_whole()
        return other

    def _sample(self, seeds: Any, times: NodeTime, key: int, first: int = 0) -> Output:
        """Sample on the GPU; uniform sampling of a homogeneous graph takes one launch of this sampler's kernel."""
        self._check_process()
        plain = times is None and self.labor is None and not isinstance(seeds, dict)
        if self._kernel is None or self.device is None or not plain:
            return super()._sample(seeds, times, key, first)
        # Checking CPU seeds does not wait for the GPU.
        seeds = to_device_async(check_seeds(seeds, self.graph.num_nodes), self.device)
        out = self._kernel.sample(seeds, self.num_neighbors, key, self.replace, self.disjoint, first)
        return self.as_output(NeighborSample(*out))

    def _in_edges(self, graph: CSCGraph, nodes: Tensor) -> NeighborSample:
        if self._kernel is None:
            return super()._in_edges(graph, nodes)
        return NeighborSample(*self._kernel.sample(nodes, [-1], 0))

    def _check_process(self) -> None:
        if self.device is not None and self.device.type != "cpu" and get_worker_info() is not None:
            raise RuntimeError(
                f"a worker process cannot sample on {self.device}, which belongs to the main process: use "
                "num_workers=0, or PersistentSamplerDataModule, whose workers are threads"
            )

    def sample_from_edges(
        self, inputs: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None, key: int | None = None
    ) -> Output:
        """Sample the endpoints of edges as :class:`NeighborSampler`, with the metadata on the GPU."""
        out = super().sample_from_edges(inputs, neg_sampling, key)
        if self.device is not None:
            out.metadata = tuple(part.to(self.device) if isinstance(part, Tensor) else part for part in out.metadata)
        return out

    @property
    def can_begin(self) -> bool:
        """Whether :meth:`begin` is supported: uniform sampling of a homogeneous graph on a GPU."""
        return self._kernel is not None and {*nonuniform_features(self)} <= {"semantics='every_hop'"}

    def begin(
        self, seeds: Tensor, sizes: Sequence[int], keys: Sequence[int], share: float = 1.0, first: int = 0
    ) -> Any:
        """Launch mini-batches asynchronously on the current stream; return a handle for :meth:`end`.

        Args:
            seeds: Seeds of at most :meth:`bulk_size` mini-batches, one after another, int64 ``[sum(sizes)]``, on the
                device; not checked.
            sizes: Number of seeds of each mini-batch.
            keys: Key of each mini-batch.
            share: Maximum fraction of the GPU for the launch.
            first: Position of the first seed in the whole mini-batch, if ranks share one; for disjoint trees.
        """
        self._check_process()
        rule = self.num_neighbors, keys, self.replace, self.disjoint
        return begin_samples(self._kernel, seeds, sizes, *rule, share, first)

    def end(self, begun: Any) -> list[SamplerOutput]:
        """Return the mini-batches of a :meth:`begin`, for use on the stream of its launch."""
        return [self.as_output(NeighborSample(*sample)) for sample in begun.end()]

    def bulk_size(self, wanted: int = 16) -> int:
        """Return the best number of mini-batches per :meth:`begin`, at most ``wanted``: 1 if each needs a launch."""
        induced = self.subgraph_type == SubgraphType.induced
        if self._kernel is None or self.disjoint or self.labor is not None or induced:
            return 1
        most = min(wanted, most_batches(self._kernel))
        if self._kernel.device.type == "cuda":
            # Node words, 8 bytes per mini-batch and node of the graph, may take an eighth of the free memory.
            free = torch.cuda.mem_get_info(self._kernel.device)[0]
            most = min(most, free // 8 // (8 * max(self.graph.num_nodes, 1)))
        return int(max(1, most))

    def compile_ahead(self, users: Iterable[PersistentNeighborSampler], bulk: int) -> None:
        """Compile the kernels of samplers that share the kernel of this one, for bulks of at most ``bulk``."""
        if self._kernel is not None:
            from lightning_gnn.ops.sample.compile_ahead import compile_sampling

            shapes = [(user.num_neighbors, user.disjoint, user.bulk_size(bulk)) for user in users]
            compile_sampling(self._kernel, shapes)

    def original_positions(self, graph: CSCGraph, edge: Tensor) -> Tensor:
        """Convert positions in CSC order to positions in the user's ``edge_index``, on the device."""
        if self._edge_ids is not None:
            ids = torch.empty((edge.numel(), 1), dtype=self.graph.edge_ids.dtype, device=edge.device)
            self._edge_ids.take(edge, ids)
            return ids.view(-1).to(torch.int64)
        if self.device is None or graph.edge_ids is None:
            return super().original_positions(graph, edge)
        return gather_rows(graph.edge_ids.view(-1, 1), edge).view(-1).to(torch.int64)


def check_launch(
    mode: str = "fused", fetch_size: object = 128, num_warps: object = 8, programs_per_sm: object = 4
) -> dict[str, Any]:
    """Return the options of the launch by name; raise a TypeError or ValueError if one is invalid."""
    if mode not in MODES:
        raise ValueError(f"unknown sampling mode {mode!r}; choose one of {', '.join(MODES)}")
    counts = {"fetch_size": fetch_size, "programs_per_sm": programs_per_sm, "num_warps": num_warps}
    numbers = {name: whole_number(value, name, 1) for name, value in counts.items()}
    if num_warps not in WARPS:
        raise ValueError(f"num_warps={num_warps!r} is not a power of two up to 32, such as 8")
    return {"mode": mode, **numbers}


def check_shardable(*samplers: BaseSampler) -> None:
    """Raise a ValueError for sampling options that the kernels do not support on sharded edges."""
    for sampler in samplers:
        if unsupported := nonuniform_features(sampler):
            raise ValueError(f"topology='shard' does not go with {unsupported[0]}; use 'device' or 'pinned'")


def find_gpu(device: torch.device | str | None = None) -> torch.device | None:
    """Return ``device``, by default the current GPU, or None if Triton kernels cannot run there."""
    if device is None:
        if not torch.cuda.is_available():
            return None
        device = torch.device("cuda", torch.cuda.current_device())
    device = torch.device(device)
    return device if runs_triton(device) else None

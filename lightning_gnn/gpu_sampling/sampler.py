"""PGSampler: whole multi-hop samples on a GPU, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as changed
from typing import Any, TypeVar

import torch
from pytorch_lightning.utilities import rank_zero_warn
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
from lightning_gnn.ops.library import require_triton
from lightning_gnn.ops.sample.definition import check_seeds
from lightning_gnn.ops.sample.triton import begin_samples, most_batches, runs_on, triton_sampler
from lightning_gnn.runtime.devices import to_device_async
from lightning_gnn.sampling.edge_attributes import NodeTime
from lightning_gnn.sampling.neighbor import Fanouts, NeighborSampler, Output, nonuniform_features

MODES = ("fused", "persistent")
GraphT = TypeVar("GraphT", CSCGraph, HeteroCSCGraph)


class PersistentNeighborSampler(NeighborSampler):
    """Neighbor sampling on a GPU, with the mini-batches of :class:`NeighborSampler`.

    All hops of a mini-batch run in one launch, and the host waits once, for the sizes. On a machine without a GPU
    it says so and samples on the CPU: the mini-batches are identical.

    Args:
        data, num_neighbors, replace, disjoint, seed: As for :class:`NeighborSampler`.
        device: Where to sample; by default the current GPU.
        topology: ``"device"`` copies the graph to the GPU; ``"pinned"`` leaves it in page-locked host memory, which the
            kernel reads over PCIe; ``"auto"`` takes the first if at most half of the free memory is needed.
        mode: ``"fused"`` (hop by hop with grid barriers) or ``"persistent"`` (a task queue, which samples uniformly in
            graphs of one type; all else runs hop by hop); the samples are equal.
        fetch_size: Tasks that a program of the queue claims at a time.
        hot_nodes: Nodes whose adjacency lists are copied to the device where the topology is in pinned memory.
        **options: Times, weights, LABOR, kinds of subgraphs and ``exclude_seed_edges``, as for
            :class:`NeighborSampler`. Induced subgraphs with weights need the graph there twice, with weights and
            without.

    Raises:
        TypeError, ValueError: What :class:`NeighborSampler` refuses; a topology, mode or fetch size that is not valid.
        RuntimeError: Page-locked memory was refused; the message has the sizes.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from torch_geometric.sampler import NodeSamplerInput
        >>> from lightning_gnn import PersistentNeighborSampler
        >>> path = Data(edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]), num_nodes=5)
        >>> sampler = PersistentNeighborSampler(path, num_neighbors=[1, 1])  # on the CPU where there is no GPU
        >>> out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([4])))
        >>> out.node.tolist(), out.edge.tolist(), out.num_sampled_nodes
        ([4, 3, 2], [3, 2], [1, 1, 1])

    Source: PGSampler, sections III and IV. The termination rule and the order of nodes and edges are this project's.
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
        hot_nodes: Tensor | None = None,
        **options: Any,
    ) -> None:
        if "backend" in options:
            raise TypeError(f"{type(self).__name__} has no backend; NeighborSampler has")
        super().__init__(data, num_neighbors, replace, disjoint, seed, **options)
        self._place(device, topology, mode, fetch_size, hot_nodes)

    @classmethod
    def of(cls, sampler: NeighborSampler, **where: Any) -> PersistentNeighborSampler:
        """Return a sampler on a GPU like one on the CPU; ``"shard"`` deals edges out to those of ``machine``."""
        other = cls.__new__(cls)
        other.__dict__.update(vars(sampler))
        other._place(**where)
        return other

    def _place(
        self,
        device: torch.device | str | None = None,
        topology: str = "auto",
        mode: str = "fused",
        fetch_size: int = 128,
        hot_nodes: Tensor | None = None,
        machine: LocalMachine | None = None,
    ) -> None:
        """Copy the graph to where the GPU reads it."""
        check_place(topology, "topology")
        if topology == "shard" and machine is None:
            raise ValueError("topology='shard' needs the other GPUs' processes: use PersistentSamplerDataModule")
        if fetch_size < 1:
            raise ValueError(f"fetch_size must be at least 1, but is {fetch_size}")
        if mode not in MODES:
            raise ValueError(f"unknown sampling mode {mode!r}; choose one of {', '.join(MODES)}")
        host, whole = self.graph, self.whole_graph
        plain = isinstance(host, CSCGraph) and host.time is None and host.weight is None
        if hot_nodes is not None and not plain:
            raise ValueError("hot_nodes are for graphs of one type without times and weights: leave them out")
        self._kernel: Any = None
        self._topology: str | None = None  # where edges are, on a GPU
        self._edge_ids: PeerShards | None = None
        self.device = find_gpu(device)
        if self.device is None:
            rank_zero_warn("No GPU for the persistent sampler: sampling the same mini-batches on the CPU.")
            return
        self.backend = "triton"
        if machine is not None and topology == "shard":
            self._share(machine, mode, fetch_size)
            return
        self._topology = choose_place(topology, host.num_bytes, self.device, "the topology")
        self.graph = self._placed(host)
        if isinstance(whole, HeteroCSCGraph):  # edges of types without weights are the same
            whole = whole.map_relations(
                lambda name, part: self.graph.relations[name] if part is host.relations[name] else part
            )
        self.whole_graph = self.graph if self.whole_graph is host else whole
        self._place_whole()
        hot = None
        if self._topology == "pinned" and hot_nodes is not None:
            hot = host.cache_adjacency(hot_nodes, self.device)
        if plain:
            self._kernel = triton_sampler(
                self.graph.indptr, self.graph.indices, self.device, mode=mode, fetch_size=fetch_size, cached=hot
            )

    def _share(self, machine: LocalMachine, mode: str, fetch_size: int) -> None:
        """Deal out the edges to the GPUs of a machine; offsets, which are read first, are on each."""
        host, self._topology = self.graph, "shard"
        assert self.device is not None
        check_dealt(self)
        indptr, sources = host.indptr.to(self.device), machine.share(host.indices.view(-1, 1), LIST_SHIFT)
        self.graph = self.whole_graph = changed(host, indptr=indptr)
        if host.edge_ids is not None:
            self._edge_ids = machine.share(host.edge_ids.view(-1, 1), LIST_SHIFT)
        local, options = sources.local.view(-1), {"mode": mode, "fetch_size": fetch_size, "shards": sources}
        self._kernel = triton_sampler(indptr, local, self.device, **options)

    def _placed(self, graph: GraphT) -> GraphT:
        """Return a copy of a graph where the GPU reads it."""
        assert self.device is not None
        if isinstance(graph, HeteroCSCGraph):
            return graph.map_relations(lambda _, part: self._placed(part))
        if self._topology == "device":
            return graph.to(self.device)
        # Offsets are few, and read first; that they are on the device also says where to sample.
        there = pinned(graph, graph.num_bytes, self.device, "the topology")
        return changed(there, indptr=there.indptr.to(self.device))

    def _place_whole(self) -> None:
        """Copy all edges to where the GPU reads them, if induced subgraphs need more than those that are picked."""
        if self.device is None or self.subgraph_type != SubgraphType.induced or self._is_there(self.whole_graph):
            return
        whole = self.whole_graph
        if isinstance(whole, HeteroCSCGraph):  # edges of types without weights are there already
            self.whole_graph = whole.map_relations(lambda _, part: part if self._is_there(part) else self._placed(part))
        else:
            self.whole_graph = self._placed(whole)

    def _is_there(self, graph: CSCGraph | HeteroCSCGraph) -> bool:
        assert self.device is not None
        parts = graph.relations.values() if isinstance(graph, HeteroCSCGraph) else [graph]
        return {part.indptr.device.type for part in parts} <= {self.device.type}

    def with_options(self, **options: object) -> PersistentNeighborSampler:
        """Return a sampler over the same graph with some attributes changed, such as ``num_neighbors``."""
        other = super().with_options(**options)
        assert isinstance(other, PersistentNeighborSampler)
        if other._topology == "shard":
            check_dealt(other)
        other._place_whole()
        return other

    def _sample(self, seeds: Any, times: NodeTime, key: int, first: int = 0) -> Output:
        """Sample on the GPU; what picks uniformly in a homogeneous graph in one launch of the persistent kernel."""
        self._check_process()
        plain = times is None and self.labor is None and not isinstance(seeds, dict)
        if self._kernel is None or self.device is None or not plain:
            return super()._sample(seeds, times, key, first)
        # On the CPU seeds are checked without waiting for the GPU.
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
        """Sample both ends of edges as :class:`NeighborSampler` does; their metadata is on the GPU too."""
        out = super().sample_from_edges(inputs, neg_sampling, key)
        if self.device is not None:
            out.metadata = tuple(part.to(self.device) if isinstance(part, Tensor) else part for part in out.metadata)
        return out

    @property
    def can_begin(self) -> bool:
        """Whether :meth:`begin` can: it picks uniformly in a graph of one type."""
        return self._kernel is not None and not nonuniform_features(self)

    def begin(self, seeds: Sequence[Tensor], keys: Sequence[int], share: float = 1.0) -> Any:
        """Launch mini-batches on the current stream, without waiting; returns what :meth:`end` takes.

        Args:
            seeds: Of at most :meth:`bulk_size` mini-batches, int64 ``[batch_size]``, on the device; not checked.
            keys: Of each.
            share: Of the GPU, how much the launch may fill.
        """
        self._check_process()
        return begin_samples(self._kernel, seeds, self.num_neighbors, keys, self.replace, self.disjoint, share)

    def end(self, begun: Any) -> list[SamplerOutput]:
        """Return mini-batches that have been begun, for use on the stream where that was."""
        return [self.as_output(NeighborSample(*sample)) for sample in begun.end()]

    def bulk_size(self, wanted: int = 8) -> int:
        """Return how many mini-batches, ``wanted`` at most, :meth:`begin` had best be given at a time.

        One, where each takes a launch of its own. Else so many that the words of their nodes, 8 bytes each per node of
        the graph, take an eighth of the free memory.
        """
        induced = self.subgraph_type == SubgraphType.induced
        if self._kernel is None or self.disjoint or self.labor is not None or induced:
            return 1
        most = min(wanted, most_batches(self._kernel))
        if self._kernel.device.type == "cuda":
            free = torch.cuda.mem_get_info(self._kernel.device)[0]
            most = min(most, free // 8 // (8 * max(self.graph.num_nodes, 1)))
        return int(max(1, most))

    def original_positions(self, graph: CSCGraph, edge: Tensor) -> Tensor:
        """Turn positions in CSC order into positions in the user's ``edge_index``, on the device."""
        if self._edge_ids is not None:
            found = torch.empty((edge.numel(), 1), dtype=self.graph.edge_ids.dtype, device=edge.device)
            self._edge_ids.take(edge, found)
            return found.view(-1).to(torch.int64)
        if self.device is None or graph.edge_ids is None:
            return super().original_positions(graph, edge)
        return gather_rows(graph.edge_ids.view(-1, 1), edge).view(-1).to(torch.int64)


def check_dealt(*samplers: BaseSampler) -> None:
    """Refuse what the kernels cannot do with edges that are dealt out to several GPUs."""
    for sampler in samplers:
        if refused := nonuniform_features(sampler):
            raise ValueError(f"topology='shard' does not go with {refused[0]}; take 'device' or 'pinned'")


def find_gpu(device: torch.device | str | None = None) -> torch.device | None:
    """Return where Triton kernels can run, the device asked for or the current GPU; None if they cannot."""
    there = torch.cuda.is_available()
    if device is None:
        if not there:
            return None
        device = torch.device("cuda", torch.cuda.current_device())
    device = torch.device(device)
    if device.type == "cuda" and there:
        require_triton(f"sampling on {device}")  # before anything is copied there, and not on the CPU without a word
    return device if runs_on(device) else None

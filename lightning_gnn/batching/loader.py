"""PyG's node and link loaders, with mini-batches prepared ahead by threads instead of processes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler import SamplerOutput

from lightning_gnn.batching.pipeline import OrderedPipeline
from lightning_gnn.graph.features import FeatureTable
from lightning_gnn.ops import batch_key, gather_rows


@dataclass
class PreparationTimes:
    """What preparing mini-batches has cost since it was last reset.

    Args:
        batches: Mini-batches handed out.
        nodes: Their nodes.
        edges: Their edges.
        sampling_s: Thread-seconds of sampling.
        features_s: Thread-seconds of feature loading.
        wait_s: Seconds for which the consumer waited.
    """

    batches: int = 0
    nodes: int = 0
    edges: int = 0
    sampling_s: float = 0.0
    features_s: float = 0.0
    wait_s: float = 0.0

    def reset(self) -> None:
        """Set all figures to zero."""
        self.__init__()  # type: ignore[misc]


class _ThreadedLoader:
    """Mixed into a PyG loader: the stages of a mini-batch with a key, an ordered pipeline of threads around them.

    ``num_workers`` threads share the graph and the features with the trainer; nothing is pickled or copied. Each thread
    keeps 8 bytes per node, plus buffers of the size of a batch.
    """

    data: Data
    batch_sampler: Any
    sampler: Any
    transform: Callable | None
    transform_sampler_output: Callable | None

    def __init__(
        self,
        *args: Any,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        seed: int = 0,
        rank: int = 0,
        loader_id: int = 0,
        first_batch: Callable[[], int] | None = None,
        tables: Mapping[str, FeatureTable] | None = None,
        **kwargs: Any,
    ) -> None:
        if num_workers < 0:
            raise ValueError(f"num_workers must not be negative, but is {num_workers}")
        if prefetch_factor is not None and prefetch_factor < 1:
            raise ValueError(f"prefetch_factor must be at least 1, but is {prefetch_factor}")
        for option in ("persistent_workers", "multiprocessing_context", "worker_init_fn", "filter_per_worker"):
            kwargs.pop(option, None)
        self.seed = seed
        self.rank = rank
        self.loader_id = loader_id
        self.first_batch = first_batch
        self.tables = dict(tables or {})
        self.num_threads = num_workers
        self.prefetch_factor_threads = prefetch_factor or 2
        self.times = PreparationTimes()
        super().__init__(*args, num_workers=0, **kwargs)  # type: ignore[call-arg]
        if not isinstance(self.data, Data):
            raise TypeError(f"expected a homogeneous torch_geometric.data.Data, got {type(self.data).__name__}")
        store = self.data._store
        self._node_keys = [key for key in store if key != "num_nodes" and store.is_node_attr(key)]
        self._edge_keys = [key for key in store if key not in ("edge_index", "adj_t") and store.is_edge_attr(key)]

    def __iter__(self) -> Iterator[Data]:
        return _ThreadedIterator(self)

    def sample(self, index: list[int], key: int) -> SamplerOutput:
        """Stage Sampling: from positions among the seeds to a subgraph."""
        raise NotImplementedError

    def describe(self, batch: Data, out: SamplerOutput) -> None:
        """Attach what tells the seeds of a batch."""
        raise NotImplementedError

    def filter_fn(self, out: SamplerOutput) -> Data:
        """Stage Feature Loading: join a subgraph with its features, as PyG's loaders do."""
        if self.transform_sampler_output is not None:
            out = self.transform_sampler_output(out)
        batch = copy.copy(self.data)
        for key in ("graph", "adj_t"):
            if key in batch:
                del batch[key]
        batch.edge_index = _joined(out.row, out.col)
        if "num_nodes" in self.data._store:
            batch.num_nodes = out.node.numel()
        for keys, ids in ((self._node_keys, out.node), (self._edge_keys, out.edge)):
            for key in keys:
                batch[key] = self._rows(key, ids)
        batch.n_id = out.node
        batch.e_id = out.edge
        batch.batch = out.batch
        batch.num_sampled_nodes = out.num_sampled_nodes
        batch.num_sampled_edges = out.num_sampled_edges
        self.describe(batch, out)
        return batch if self.transform is None else self.transform(batch)

    def prepare(self, task: tuple[int, int, list[int]]) -> tuple[Data, PreparationTimes]:
        """Make one mini-batch from its epoch, its number and the positions of its seeds; safe in any thread."""
        epoch, number, index = task
        key = batch_key(self.seed, self.rank, self.loader_id, epoch, number)
        start = time.perf_counter()
        out = self.sample(index, key)
        sampled = time.perf_counter()
        batch = self.filter_fn(out)
        if self.pin_memory and torch.accelerator.is_available():  # type: ignore[attr-defined]
            batch = batch.pin_memory()
        end = time.perf_counter()
        return batch, PreparationTimes(1, out.node.numel(), out.row.numel(), sampled - start, end - sampled)

    def _rows(self, key: str, ids: Tensor) -> Any:
        if key in self.tables:
            return self.tables[key].gather(ids)
        value = self.data[key]
        dim = self.data.__cat_dim__(key, value)
        if isinstance(value, Tensor) and value.is_cpu and ids.is_cpu and dim == 0:
            return gather_rows(value, ids)
        if isinstance(value, Tensor):
            return value.index_select(dim, ids.to(value.device))
        return [value[i] for i in ids.tolist()]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} batches, num_workers={self.num_threads})"  # type: ignore[arg-type]


class _ThreadedIterator:
    """Starts at the first ``next``: Lightning asks for the iterator before it sets the epoch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._pipeline: OrderedPipeline | None = None

    def __iter__(self) -> Iterator[Data]:
        return self

    def __next__(self) -> Data:
        loader = self._loader
        start = time.perf_counter()
        if self._pipeline is None:
            self._pipeline = self._begin()
        batch, cost = next(self._pipeline)
        times = loader.times
        times.batches += 1
        times.nodes += cost.nodes
        times.edges += cost.edges
        times.sampling_s += cost.sampling_s
        times.features_s += cost.features_s
        times.wait_s += time.perf_counter() - start
        return batch

    def _begin(self) -> OrderedPipeline:
        loader = self._loader
        epoch = getattr(loader.sampler, "epoch", 0)
        first = 0 if loader.first_batch is None else loader.first_batch()
        numbered = ((epoch, number, index) for number, index in enumerate(loader.batch_sampler))
        ahead = loader.num_threads * loader.prefetch_factor_threads
        return OrderedPipeline(islice(numbered, first, None), loader.prepare, loader.num_threads, ahead)

    def close(self) -> None:
        """Stop preparing and join the threads."""
        if self._pipeline is not None:
            self._pipeline.close()


class ThreadedNodeLoader(_ThreadedLoader, NodeLoader):
    """Mini-batches of seeds, in deterministic order, prepared ahead by threads.

    Takes the arguments of PyG's ``NodeLoader``, whose batches it equals attribute by attribute.

    Args:
        num_workers: Threads that prepare mini-batches; 0 prepares in the caller's thread.
        prefetch_factor: Mini-batches prepared ahead per thread, 2 by default.
        seed: Start of the random stream.
        rank: Which process of a distributed run.
        loader_id: Which loader of the run.
        first_batch: Called when iteration starts; tells how many batches of the epoch to skip.
        tables: Where to gather some attributes from instead of ``data``, such as device memory.

    Raises:
        TypeError: The data is not homogeneous.
        ValueError: A negative number of workers or no prefetching.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Lightning makes loaders anew to overfit, from the arguments of the first __init__ that it finds in a class
        # derived from torch's DataLoader; our own would be those of PyG's.
        super().__init__(*args, **kwargs)

    def sample(self, index: list[int], key: int) -> SamplerOutput:
        """Sample the neighbourhoods of some seeds."""
        return self.node_sampler.sample_from_nodes(self.input_data[index], key=key)

    def describe(self, batch: Data, out: SamplerOutput) -> None:
        """Attach ``input_id`` and ``batch_size``."""
        batch.input_id = out.metadata[0]
        batch.seed_time = None
        batch.batch_size = out.metadata[0].size(0)


class ThreadedLinkLoader(_ThreadedLoader, LinkLoader):
    """Mini-batches of edges, in deterministic order, prepared ahead by threads.

    Takes the arguments of PyG's ``LinkLoader``, whose batches it equals attribute by attribute, and those that
    :class:`ThreadedNodeLoader` adds.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # here for Lightning, as in ThreadedNodeLoader

    def sample(self, index: list[int], key: int) -> SamplerOutput:
        """Sample the neighbourhoods of the ends of some edges, and of negative ones."""
        return self.link_sampler.sample_from_edges(self.input_data[index], neg_sampling=self.neg_sampling, key=key)

    def describe(self, batch: Data, out: SamplerOutput) -> None:
        """Attach ``input_id`` and the labelled edges, or the triplets, in local ids."""
        batch.input_id = out.metadata[0]
        if self.neg_sampling is None or self.neg_sampling.is_binary():
            batch.edge_label_index, batch.edge_label, batch.edge_label_time = out.metadata[1:4]
        else:
            batch.src_index, batch.dst_pos_index, batch.dst_neg_index, batch.seed_time = out.metadata[1:5]
            for key in ("edge_label_index", "edge_label_time"):
                if key in batch:
                    del batch[key]


def _joined(row: Tensor, col: Tensor) -> Tensor:
    """Return ``edge_index``, without a copy where both are the rows of one tensor."""
    base = row._base
    if (
        base is not None
        and base is col._base
        and base.shape == (2, row.numel())
        and base[1].data_ptr() == col.data_ptr()
    ):
        return base
    return torch.stack([row, col])

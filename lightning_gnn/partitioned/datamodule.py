"""DataModules for partitioned graphs, with the mini-batches of a single machine that has the whole graph."""

import atexit
import itertools
import os
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler
from typing_extensions import override

from lightning_gnn.datamodules.base import EpochPosition, MiniBatchDataModule
from lightning_gnn.datamodules.full_batch import inference_settings, only_batch
from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.datamodules.node import NeighborDataModule, as_ids
from lightning_gnn.distributed.exceptions import end_process
from lightning_gnn.distributed.heartbeat import Heartbeats
from lightning_gnn.distributed.monitored_ranks import MonitoredRanks
from lightning_gnn.graph.stores import AttributeName, StoreType
from lightning_gnn.loading.batch import Batch
from lightning_gnn.loading.seed_order import OwnSeedsOrder
from lightning_gnn.nn.inference import Elsewhere, FullInference
from lightning_gnn.nn.module import GNNModule
from lightning_gnn.partitioned.elastic import Elastic
from lightning_gnn.partitioned.exchange import RankRPC
from lightning_gnn.partitioned.folder import SPLITS, Partition
from lightning_gnn.partitioned.future import count_future, top_accessed_rows
from lightning_gnn.partitioned.inference import PartitionedInference, PublishedRows, check_model
from lightning_gnn.partitioned.remote import Remote
from lightning_gnn.partitioned.sampler import Connection, EdgeRows, NodeRows, PartitionedSampler
from lightning_gnn.partitioned.shard import Shard, holders
from lightning_gnn.partitioned.whole import expanded_zeros, with_topology, without_rows
from lightning_gnn.runtime.lightning import SIGTERMException, rank_zero_info
from lightning_gnn.runtime.messages import memory_bytes, true_or_false

ORDERS = ("global", "local")
TOPOLOGIES = ("parts", "whole")
_UNSUPPORTED = {
    "feature_dtype": "is chosen when the graph is partitioned",
    "memory": "reads one file, but the rows of a part are always memory-mapped",
    "node_sampler": "would have to access all parts",
    "link_sampler": "would have to access all parts",
}
_STORE_IDS = itertools.count()


class _PartitionedMixin(MiniBatchDataModule):
    """Connects the ranks and reads the parts for both DataModules; precedes the base class that makes mini-batches."""

    def __init__(
        self,
        root: str | Path,
        *args: Any,
        topology: str = "parts",
        order: str = "global",
        elastic: bool = False,
        cache: int | str = 0,
        count_batches: int = 100,
        silence: float = 60.0,
        rpc_timeout: float = 300.0,
        tls: Mapping[str, str | Path] | None = None,
        seed: int | None = None,
        num_workers: int = 1,
        **kwargs: Any,
    ) -> None:
        for name, value, choices in (("topology", topology, TOPOLOGIES), ("order", order, ORDERS)):
            if value not in choices:
                raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, choices))}")
        for name, reason in _UNSUPPORTED.items():
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name}={kwargs[name]!r} does not work with a partitioned graph: it {reason}; leave it out"
                )
        if true_or_false(elastic, "elastic") and order != "global":
            raise ValueError(f"elastic=True needs order='global', but order is {order!r}")
        if not isinstance(root, str | os.PathLike):
            raise TypeError(f"root is {type(root).__name__}; give the folder that lgnn partition has made")
        if count_batches < 1:
            raise ValueError(f"count_batches must be at least 1, but is {count_batches}")
        for name, seconds in (("silence", silence), ("rpc_timeout", rpc_timeout)):
            if seconds <= 0:
                raise ValueError(f"{name} must be more than 0 seconds, but is {seconds}")
        if tls is not None and {*tls} != {"certificate", "key", "root"}:
            raise ValueError(f"tls needs the paths certificate, key and root, but has {', '.join(tls) or 'none'}")
        self._elastic = Elastic() if elastic else None
        self.partition = Partition(root)
        if (full := inference_settings(kwargs.get("inference"))) is not None:
            PartitionedInference.of(full)
            self.needs_all_ranks = True
        self.topology, self.order = topology, order
        self.cache, self.count_batches, self.silence = memory_bytes(cache, "cache"), count_batches, float(silence)
        self.rpc_timeout, self.tls = float(rpc_timeout), tls
        self.connection = Connection()
        self.rows_read: Counter[str] = Counter()
        """Number of node rows read from local parts, other ranks and the cache, in completed runs."""
        self._has_seed = seed is not None
        self._heartbeats: Heartbeats | None = None
        time_attr = kwargs.get("time_attr")
        whole = topology == "whole"
        data = with_topology(self.partition, time_attr) if whole else without_rows(self.partition)
        kwargs.update(check_features=False, share_memory=False, num_workers=num_workers)
        kwargs = self._add_splits(args, kwargs)
        super().__init__(data, *args, seed=seed, **kwargs)  # type: ignore[misc]
        self.position = _RanksPosition(self)
        self.tables = self._make_tables(time_attr if whole else None)

    def _add_splits(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs

    @override
    def make_sampler(self, data: Batch) -> BaseSampler:
        if self.topology == "whole":
            return super().make_sampler(data)
        assert self.sampling_options is not None
        return PartitionedSampler(self.partition, self.connection, seed=self.seed, **self.sampling_options.given())

    def _make_tables(self, in_memory: str | None) -> dict[AttributeName, NodeRows | EdgeRows]:
        """Return the tables of partitioned attributes for the loaders, without the node attribute ``in_memory``."""
        tables: dict[AttributeName, NodeRows | EdgeRows] = {}
        for number, info in enumerate(self.partition.nodes):
            memo, keys = threading.local(), [key for key in info.attributes if key != in_memory]
            for key in keys:
                rows = NodeRows(self.connection, number, key, keys, memo)
                tables[key if info.name is None else (info.name, key)] = rows
        if self.topology == "parts":
            for number, info in enumerate(self.partition.edges):
                for key in info.attributes:
                    name = key if info.name is None else (info.name, key)
                    tables[name] = EdgeRows(lambda: self.graph_sampler, number, key)
        return tables

    def setup(self, stage: str) -> None:
        """Connect the ranks, open this rank's parts and fill the cache. All ranks must call this."""
        super().setup(stage)
        module = None if self.trainer is None else self.trainer.lightning_module
        if self.inference is not None and isinstance(module, GNNModule):
            check_model(module.model, self.partition, module.embeddings)
        if self.connection.remote is not None:
            return
        if self._elastic is not None and self.trainer is not None and stage == "fit":
            if self._elastic not in self.trainer.callbacks:  # type: ignore[attr-defined]
                self.trainer.callbacks.append(self._elastic)  # type: ignore[attr-defined]
            # An epoch resumed with another number of ranks has another number of steps.
            self.trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        self._watch_ranks()
        grouped = dist.is_available() and dist.is_initialized()
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        parts = [part for part, owners in enumerate(holders(self.partition.parts, ranks)) if rank in owners]
        # If a part is damaged, do not raise yet: all ranks must learn of it in the all-gather below.
        try:
            shard, failure = Shard(self.partition, parts, self.topology == "parts"), None
        except (OSError, ValueError, RuntimeError) as error:
            failure = error
        self._published = PublishedRows(self.partition.parts, ranks)
        exchange = RankRPC({} if failure is not None else {
            "published_rows": self._published.read,
            **{name: getattr(shard, name) for name in ("picks", "node_rows", "edge_rows")},
        }, self.rpc_timeout, self.tls)  # fmt: skip
        self._exchange = exchange
        settings = {
            "partition": self.partition.id, "topology": self.topology, "order": self.order,
            "num_neighbors": str(self.num_neighbors), "batch_size": self.batch_size,
            **({"seed": self.seed} if self._has_seed else {}),
        }  # fmt: skip
        problem = None if failure is None else f"{type(failure).__name__}: {failure}"
        gathered = exchange.all_gather((problem, settings, self.seed))
        try:
            if failure is not None:
                raise failure
            for other, (other_problem, other_settings, _) in enumerate(gathered):
                if other_problem is not None:
                    raise RuntimeError(f"rank {other} cannot open its part of the graph: {other_problem}")
                for name, value in settings.items():
                    if (different := other_settings.get(name)) != value:
                        fix = ", so copy all parts of one partition" if name == "partition" else ""
                        mismatch = f"rank {rank} has {name}={value}, but rank {other} has {name}={different}"
                        raise ValueError(f"{mismatch}: all ranks need the same{fix}")
        except (OSError, ValueError, RuntimeError):
            exchange.close()
            raise
        self.seed = gathered[0][2]  # without a seed argument, use that of rank 0
        self.connection.remote = Remote(self.partition, shard, exchange)
        if isinstance(self.graph_sampler, PartitionedSampler):
            self.graph_sampler.prepare()
        exchange.all_gather(None)  # barrier: other ranks may sample from this rank's lists from here on
        if stage == "fit" and self.cache:
            remote, loader = self.connection.remote, cast(Any, self.make_loader("train"))
            epoch = self.position.passes if self.trainer is None else self.trainer.current_epoch
            counts = count_future(loader, remote, epoch, self.count_batches)
            row_bytes = [remote.row_bytes(number) for number in range(len(counts))]
            num_cached = remote.fill_cache(top_accessed_rows(counts, row_bytes, self.cache))
            rank_zero_info(f"cached rows of other parts: {num_cached}")

    def teardown(self, stage: str) -> None:
        """Disconnect from the other ranks once all are done. All ranks must call this."""
        super().teardown(stage)
        if self.connection.remote is not None:
            self.connection.remote.exchange.close()
            self.rows_read += self.connection.remote.rows_read
            self.connection.remote = None
        if self._heartbeats is not None:
            self._heartbeats.stop()
            self._heartbeats = None

    def on_exception(self, exception: BaseException) -> None:
        """Add the lost rank to the message, or notify the other ranks of this rank's failure."""
        if isinstance(exception, SIGTERMException):  # all ranks have agreed to stop
            atexit.register(self.teardown, "fit")  # after the loaders have been closed
        elif self._heartbeats is not None:
            self._heartbeats.handle_exception(exception)

    def _watch_ranks(self) -> None:
        """Start heartbeats that detect a dead rank, unless the strategy has them."""
        trainer = self.trainer  # without one, requests have deadlines nevertheless
        if trainer is None or trainer.world_size == 1 or isinstance(trainer.strategy, MonitoredRanks):
            return
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"partitioned {next(_STORE_IDS)}", dist.distributed_c10d._get_default_store()
        )
        end = partial(end_process, trainer=trainer)
        self._heartbeats = Heartbeats(store, dist.get_rank(), dist.get_world_size(), self.silence, end)
        self._heartbeats.start()

    @override
    def sampled_loader(self, stage: str, data: Batch, sampler: Any, *args: Any, **options: Any) -> Any:
        _ = self.connection.open  # raises an error before setup
        return super().sampled_loader(stage, data, sampler, *args, tables=self.tables, **options)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for resuming in addition to Lightning's. All ranks must call this."""
        state = super().state_dict()
        return state if self._elastic is None else {**state, "elastic": self._elastic.state(self.trainer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of an interrupted run."""
        ranks = len(state_dict.get("rng", []))
        if self._elastic is not None:
            self._elastic.load(state_dict.get("elastic", {}))
        mid_epoch = state_dict.get("position", {}).get("mid_epoch", False)
        if ranks != self._world_size and mid_epoch:
            if self._elastic is None or not state_dict.get("elastic"):
                saved = f"the checkpoint is from within an epoch of {ranks} ranks, but there are {self._world_size}"
                raise ValueError(f"{saved}: elastic=True (in both runs) allows any number")
            if any(state_dict.get("gradients", [])):
                saved = f"the checkpoint holds gradients accumulated on {ranks} ranks"
                raise ValueError(f"{saved}, which {self._world_size} ranks cannot use: resume from one after a step")
        super().load_state_dict(state_dict)

    def _local_seeds(self, stage: str, count: int) -> Tensor:
        """Return the indices of the seeds that this rank evaluates with exact inference, int64 ``[n]``."""
        local = torch.tensor([*self.position.order(stage, count, False, *self.position.replica())], dtype=torch.int64)
        if not local.numel():
            ranks = self.connection.open.exchange.ranks
            raise ValueError(
                f"inference='full': each of {ranks} ranks needs a seed of the {stage} split, which has {count}"
            )
        return local

    def _inference_loader(self, wanted: dict[Any, Tensor], name: StoreType = None, **more: object) -> DataLoader[Batch]:
        """Return a loader of one batch that requests exact outputs; ``more`` are attributes of the type ``name``."""
        assert isinstance(self.inference, FullInference)
        remote, is_hetero = self.connection.open, self.partition.is_hetero
        batch: Batch = HeteroData() if is_hetero else Data()
        for node_type, ids in wanted.items():
            number = self.partition.number.get(node_type, 0)
            attributes = [key for key in self.partition.nodes[number].attributes if key != "x"]
            rows = remote.node_rows(number, ids.numpy(), attributes)
            (batch[node_type] if is_hetero else batch).update({"n_id": ids, **rows})
        (batch[name] if is_hetero else batch).update(more)
        if not is_hetero:
            batch.x = expanded_zeros([wanted[None].numel(), *self.data.x.shape[1:]], self.data.x.dtype)
            batch.edge_index = Elsewhere(self.partition.edges[0].count)
            if "edge_weight" in self.partition.edges[0].attributes:
                batch.edge_weight = expanded_zeros([0], torch.float32)  # weights are read with the edges
        batch.runner = PartitionedInference.of(self.inference, remote=remote, published=self._published, wanted=wanted)
        return only_batch(batch)

    def owners_of_seeds(self, ranks: int) -> Tensor:
        """Return the rank that has each training seed (or seed edge's target); ranks with the same part alternate."""
        node_type, ids = self._seed_nodes()
        part = self.partition.owner[self.partition.number.get(node_type, 0)].numpy()[ids.numpy()]
        owners = np.empty(part.size, np.int64)
        for number, part_ranks in enumerate(holders(self.partition.parts, ranks)):
            seeds = np.flatnonzero(part == number)
            owners[seeds] = np.array(part_ranks)[np.arange(seeds.size) % len(part_ranks)]
        return torch.from_numpy(owners)

    def _seed_nodes(self) -> tuple[StoreType, Tensor]:
        raise NotImplementedError


class _RanksPosition(EpochPosition):
    """The position of connected ranks, which divide the seeds by owner, or whose number may change within an epoch."""

    datamodule: _PartitionedMixin

    @override
    def replica(self) -> tuple[int, int]:
        remote = self.datamodule.connection.remote
        if self.datamodule.trainer is None and remote is not None:
            return remote.exchange.ranks, remote.exchange.rank
        return super().replica()

    @override
    def order(self, stage: str, num_seeds: int, drop_last: bool, replicas: int, rank: int) -> DistributedSampler[int]:
        ranks = self.datamodule
        options: dict[str, Any] = {
            "num_replicas": replicas, "rank": rank, "shuffle": ranks.shuffle, "seed": ranks.seed % 2**62,
            "drop_last": drop_last,
        }  # fmt: skip
        if stage == "train" and ranks._elastic is not None:
            return ranks._elastic.begin(ranks.trainer, num_seeds, ranks.batch_size, **options)
        if stage == "train" and ranks.order == "local":
            return OwnSeedsOrder(ranks.owners_of_seeds(replicas), **options)
        return super().order(stage, num_seeds, drop_last, replicas, rank)

    @override
    def first_batch(self) -> int:
        first = super().first_batch()
        if self.datamodule._elastic is not None:
            self.datamodule._elastic.check(first)
        return first


class PartitionedDataModule(_PartitionedMixin, NeighborDataModule):
    """A :class:`~lightning_gnn.NeighborDataModule` over a graph that was partitioned by ``lgnn partition``.

    Each rank reads its own part, and requests the rest from other ranks. For a given seed, the mini-batches are bit for
    bit those of one machine with the whole graph, for any number of parts and ranks.

    Args:
        root: Folder of the partitioned graph, or its URL.
        *args: Seeds for training, validation, testing and prediction, as for
            :class:`~lightning_gnn.NeighborDataModule`, by the ids of the whole graph; by default those of its masks.
        topology: With ``"parts"``, each rank has the in-edges of its nodes, and requests others hop by hop. With
            ``"whole"``, each rank has all edges and their attributes in memory, and requests only node attributes.
        order: Order of the training seeds. ``"global"``: that of one machine. ``"local"``: each rank samples seeds of
            its own part, which needs far fewer remote rows; a rank with fewer seeds than others repeats some.
        elastic: Use each seed once per epoch, and allow resuming with any number of ranks, also within an epoch.
            Requires ``order="global"``.
        cache: Bytes for caching the remote rows that the coming mini-batches read most often, such as ``"2GB"``.
        count_batches: Number of coming mini-batches to sample for selecting the cached rows.
        silence: Seconds without a heartbeat after which a rank counts as lost.
        rpc_timeout: Seconds after which a request that a rank has not answered raises an error that names the rank.
        tls: Paths of PEM files to encrypt the rows on the network: ``certificate`` of this machine's host name, its
            ``key``, and ``root``, the certificate of the authority that issued those of all machines.
        seed: Random seed; by default that of rank 0.
        num_workers: Number of threads that prepare mini-batches, including the requests to other ranks.
        **kwargs: Further arguments of :class:`~lightning_gnn.NeighborDataModule`. Those that need the whole graph are
            refused, except ``inference="full"``: each rank computes the outputs of its own nodes layer by layer, and
            evaluates a part of the seeds in one batch.

    Raises:
        FileNotFoundError: ``root`` is not a partitioned graph.
        ValueError: A file is damaged, an option is unknown or invalid, or as for ``NeighborDataModule``.

    Examples:
        >>> import tempfile, torch
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn import PartitionedDataModule
        >>> from lightning_gnn.partitioned import partition_graph
        >>> path = Data(x=torch.eye(5), y=torch.arange(5) % 2, edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
        >>> folder = tempfile.mkdtemp()
        >>> summary = partition_graph(path, folder, parts=2, method="ldg")
        >>> datamodule = PartitionedDataModule(
        ...     folder, torch.tensor([4, 1]), num_neighbors=[1], batch_size=2, shuffle=False
        ... )
        >>> datamodule.setup("fit")  # a Trainer does it
        >>> batch = next(iter(datamodule.train_dataloader()))
        >>> batch.n_id, batch.edge_index
        (tensor([4, 1, 3, 0]), tensor([[2, 3],
                [0, 1]]))
        >>> datamodule.teardown("fit")
    """

    def _add_splits(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        for index, stage in enumerate(SPLITS):  # two positional arguments per stage: nodes and times
            split = self.partition.split(stage)
            if split is not None and len(args) <= 2 * index and kwargs.get(f"input_{stage}_nodes") is None:
                name, mask = split
                kwargs[f"input_{stage}_nodes"] = mask if name is None else (name, mask)
        return kwargs

    @override
    def full_loader(self, stage: str) -> DataLoader[Batch]:
        # One batch of this rank's seeds, in the order of one machine.
        count, seeds = self.num_seeds(stage), self._seeds(stage)
        node_type, nodes = seeds if self.partition.is_hetero else (None, seeds)
        wanted = torch.arange(count) if nodes is None else as_ids(nodes)
        wanted = wanted[self._local_seeds(stage, count)]
        return self._inference_loader({node_type: wanted}, node_type, batch_size=wanted.numel())

    def _seed_nodes(self) -> tuple[StoreType, Tensor]:
        return self._types["train"], as_ids(self._nodes["train"])


class PartitionedLinkDataModule(_PartitionedMixin, LinkDataModule):
    """A :class:`~lightning_gnn.LinkDataModule` over a graph that was partitioned by ``lgnn partition``.

    It has the options of :class:`PartitionedDataModule`. Edges are given by the node ids of the whole graph; by default
    they are those saved with the partition (``lgnn partition task=link``, or ``task=recommend``, whose edges have
    times). With ``order="local"``, each rank trains on the edges into the nodes of its part.

    Raises:
        FileNotFoundError: ``root`` is not a partitioned graph.
        ValueError: Training edges are missing, or as for :class:`PartitionedDataModule`.

    Examples:
        >>> import tempfile, torch
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn import PartitionedLinkDataModule
        >>> from lightning_gnn.partitioned import partition_graph
        >>> edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
        >>> folder = tempfile.mkdtemp()
        >>> summary = partition_graph(Data(x=torch.eye(5), edge_index=edge_index), folder, parts=2, method="ldg")
        >>> datamodule = PartitionedLinkDataModule(folder, edge_index, num_neighbors=[1], batch_size=4, shuffle=False)
        >>> datamodule.setup("fit")
        >>> next(iter(datamodule.train_dataloader())).edge_label_index
        tensor([[0, 1, 2, 3],
                [1, 2, 3, 4]])
        >>> datamodule.teardown("fit")
    """

    def _add_splits(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        inputs = [*args[::3], *(value for name, value in kwargs.items() if re.fullmatch("input_.*_edges", name))]
        if any(isinstance(value, tuple) and all(isinstance(item, str) for item in value) for value in inputs):
            raise ValueError("an edge type without edges means all of them, but no rank has all: give the edges too")
        for index, stage in enumerate(("train", "val", "test")):  # three positional arguments: edges, labels, times
            if len(args) <= 3 * index and kwargs.get(f"input_{stage}_edges") is None:
                edges, edge_type = self.partition.links(stage), self.partition.link_type
                kwargs[f"input_{stage}_edges"] = edges if edge_type is None or edges is None else (edge_type, edges)
                for name in ("labels", "time"):
                    if (values := self.partition.links(f"{stage}_{name}")) is not None:
                        kwargs[f"input_{stage}_{name}"] = values
        if not args and kwargs.get("input_train_edges") is None:
            fix = "so give training edges, or partition with some (lgnn partition task=link, or task=recommend)"
            raise ValueError(f"input_train_edges is missing: no rank has all edges of the graph, {fix}")
        return kwargs

    @override
    def full_loader(self, stage: str) -> DataLoader[Batch]:
        # One batch of this rank's labeled edges, in the order of one machine.
        more, kind = self.labeled_edges(stage), self._types[stage]
        edges = more.pop("edge_label_index")
        local = self._local_seeds(stage, edges.size(1))
        types, wanted = (None, None) if kind is None else (kind[0], kind[2]), {}
        for node_type in dict.fromkeys(types):
            ids = edges[[end for end, end_type in enumerate(types) if end_type == node_type]][:, local]
            wanted[node_type] = ids.unique()  # type: ignore[no-untyped-call]
        ends = [torch.searchsorted(wanted[node_type], edges[end, local]) for end, node_type in enumerate(types)]
        more = {key: value[local] for key, value in more.items()}
        return self._inference_loader(wanted, kind, edge_label_index=torch.stack(ends), **more)

    def _seed_nodes(self) -> tuple[StoreType, Tensor]:
        (edges, _), name = self.seed_edges("train"), self._types["train"]
        return None if name is None else name[2], edges[1]

"""Training on a graph of which each rank has a part: the mini-batches are those of one machine with all of it."""

import itertools
import os
import re
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torch_geometric.data import Data, HeteroData
from typing_extensions import override

from lightning_gnn.datamodules.base import MiniBatchDataModule
from lightning_gnn.datamodules.full_batch import inference_settings, only_batch
from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.datamodules.node import NeighborDataModule, as_ids
from lightning_gnn.datamodules.options import SamplingOptions
from lightning_gnn.distributed.heartbeat import Heartbeats, end_process
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
from lightning_gnn.partitioned.inference import InParts, Published, check_model
from lightning_gnn.partitioned.remote import Remote
from lightning_gnn.partitioned.sampler import Connection, EdgeRows, NodeRows, PartitionedSampler
from lightning_gnn.partitioned.shard import Shard, holders
from lightning_gnn.partitioned.whole import nothing, with_topology, without_rows
from lightning_gnn.runtime.messages import memory_bytes, true_or_false

ORDERS = ("global", "local")
TOPOLOGIES = ("parts", "whole")
_ELSEWHERE = {
    "feature_dtype": "is chosen when the graph is partitioned",
    "memory": "reads one file, and a part's rows are mapped into memory by themselves",
    "node_sampler": "would have to reach all parts",
    "link_sampler": "would have to reach all parts",
}
_RUNS = itertools.count()


class _OnParts(MiniBatchDataModule):
    """What both DataModules do about parts; goes before the one that does the rest."""

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
        seed: int | None = None,
        num_workers: int = 1,
        **kwargs: Any,
    ) -> None:
        for name, value, choices in (("topology", topology, TOPOLOGIES), ("order", order, ORDERS)):
            if value not in choices:
                raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, choices))}")
        for name, why in _ELSEWHERE.items():
            if (given := kwargs.get(name)) is not None:
                raise ValueError(f"{name}={given!r} does not go with a partitioned graph: it {why}; leave it out")
        if true_or_false(elastic, "elastic") and order != "global":
            raise ValueError(f"elastic=True counts in the order of one machine, so it does not go with order={order!r}")
        if not isinstance(root, str | os.PathLike):
            raise TypeError(f"root is {type(root).__name__}; give the folder that lgnn partition has made of it")
        if count_batches < 1:
            raise ValueError(f"count_batches must be at least 1, but is {count_batches}")
        if silence <= 0:
            raise ValueError(f"silence must be more than 0 seconds, but is {silence}")
        self._elastic = Elastic() if elastic else None
        self.partition = Partition(root)
        if (full := inference_settings(kwargs.get("inference"))) is not None:
            InParts.of(full)
        self.topology, self.order = topology, order
        self.cache, self.count_batches, self.silence = memory_bytes(cache, "cache"), count_batches, float(silence)
        self.connection = Connection()
        self.rows_read: Counter[str] = Counter()
        """Rows of nodes that were read here, asked of other ranks, or kept, in the runs so far."""
        self._own_seed = seed is not None
        self._heartbeats: Heartbeats | None = None
        self._joined = False  # whether all ranks are through with setup
        time_attr = kwargs.get("time_attr")
        whole = topology == "whole"
        data = with_topology(self.partition, time_attr) if whole else without_rows(self.partition)
        kwargs.update(check_features=False, share_memory=False, num_workers=num_workers)
        kwargs = self._with_splits(args, kwargs)
        super().__init__(data, *args, seed=seed, **kwargs)  # type: ignore[misc]
        self.tables = self._tables(time_attr if whole else None)

    def _with_splits(self, given: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs

    @override
    def make_sampler(self, data: Batch, options: SamplingOptions) -> Any:
        if self.topology == "whole":
            return super().make_sampler(data, options)
        return PartitionedSampler(self.partition, self.connection, seed=self.seed, **options.given())

    def _tables(self, here: str | None) -> dict[AttributeName, NodeRows | EdgeRows]:
        """Return where loaders gather what lies in parts, by attribute."""
        tables: dict[AttributeName, NodeRows | EdgeRows] = {}
        for number, kind in enumerate(self.partition.nodes):
            memo, beside = threading.local(), [key for key in kind.attributes if key != here]
            for key in beside:
                rows = NodeRows(self.connection, number, key, beside, memo)
                tables[key if kind.name is None else (kind.name, key)] = rows
        if self.topology == "parts":
            for number, kind in enumerate(self.partition.edges):
                for key in kind.attributes:
                    name = key if kind.name is None else (kind.name, key)
                    tables[name] = EdgeRows(lambda: self.graph_sampler, number, key)
        return tables

    def setup(self, stage: str) -> None:
        """Join the ranks, open this rank's parts, and fill the cache; all ranks must call it."""
        super().setup(stage)
        module = None if self.trainer is None else self.trainer.lightning_module
        if self.inference is not None and isinstance(module, GNNModule):
            check_model(module.model, self.partition, module.embeddings)
        if self.connection.remote is not None:
            return
        if self._elastic is not None and self.trainer is not None and stage == "fit":
            if self._elastic not in self.trainer.callbacks:  # type: ignore[attr-defined]
                self.trainer.callbacks.append(self._elastic)  # type: ignore[attr-defined]
            # Epochs that other numbers of ranks have begun have other numbers of steps.
            self.trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        self._watch_ranks()
        grouped = dist.is_available() and dist.is_initialized()
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        mine = [part for part, held in enumerate(holders(self.partition.parts, ranks)) if rank in held]
        # A rank whose part is damaged must say so to the others, who would wait for it.
        try:
            shard, trouble = Shard(self.partition, mine, self.topology == "parts"), None
        except (OSError, ValueError) as error:
            trouble = error
        self._published = Published(self.partition.parts, ranks)
        exchange = RankRPC({} if trouble is not None else {
            "published": self._published.published,
            **{name: getattr(shard, name) for name in ("picks", "node_rows", "edge_rows")},
        })  # fmt: skip
        self._exchange = exchange
        about = {
            "partition": self.partition.id, "topology": self.topology, "order": self.order,
            "num_neighbors": str(self.num_neighbors), "batch_size": self.batch_size,
            **({"seed": self.seed} if self._own_seed else {}),
        }  # fmt: skip
        given = exchange.gather((None if trouble is None else f"{type(trouble).__name__}: {trouble}", about, self.seed))
        try:
            if trouble is not None:
                raise trouble
            for other, (wrong, theirs, _) in enumerate(given):
                if wrong is not None:
                    raise RuntimeError(f"rank {other} cannot open its part of the graph: {wrong}")
                for name, value in about.items():
                    if theirs.get(name) != value:
                        fix = ", so copy all parts of one partition" if name == "partition" else ""
                        unlike = f"rank {rank} has {name}={value}, but rank {other} has {name}={theirs.get(name)}"
                        raise ValueError(f"{unlike}: all ranks need the same{fix}")
        except (OSError, ValueError, RuntimeError):
            exchange.close()
            raise
        self.seed = given[0][2]  # that of rank 0, where none was given
        self.connection.remote = Remote(self.partition, shard, exchange)
        if isinstance(self.graph_sampler, PartitionedSampler):
            self.graph_sampler.prepare()
        exchange.gather(None)  # from here on lists are asked for
        if stage == "fit" and self.cache:
            remote, loader = self.connection.remote, cast(Any, self.make_loader("train"))
            epoch = self._passes if self.trainer is None else self.trainer.current_epoch
            counts = count_future(loader, remote, epoch, self.count_batches)
            remote.keep(
                top_accessed_rows(counts, [remote.row_bytes(number) for number in range(len(counts))], self.cache)
            )
            rank_zero_info(f"rows of other parts that are kept: {remote.kept_rows}")
        self._joined = True

    def teardown(self, stage: str) -> None:
        """Leave the other ranks when all are through."""
        super().teardown(stage)
        if self.connection.remote is not None:
            self.connection.remote.exchange.close()
            self.rows_read += self.connection.remote.rows_read
            self.connection.remote = None
        if self._heartbeats is not None:
            self._heartbeats.stop()
            self._heartbeats = None

    def on_exception(self, exception: BaseException) -> None:
        """Say in the message which rank was lost, or tell the others that it is this one."""
        if self._heartbeats is not None:
            self._heartbeats.handle_exception(exception)

    def _watch_ranks(self) -> None:
        """Notice within seconds that a rank is lost, unless the strategy does."""
        strategy = None if self.trainer is None else self.trainer.strategy
        grouped = dist.is_available() and dist.is_initialized()
        if not grouped or dist.get_world_size() == 1 or isinstance(strategy, MonitoredRanks):
            return
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"partitioned {next(_RUNS)}", dist.distributed_c10d._get_default_store()
        )
        # Without a Trainer, a rank that ends its program without teardown is missed only by one that asks for its rows.
        end = self._abort if self.trainer is None else None
        self._heartbeats = Heartbeats(store, dist.get_rank(), dist.get_world_size(), self.silence, end)
        self._heartbeats.start()

    def _abort(self, why: str) -> None:
        """Raise an error where this rank waits for rows; within setup end the process, where all wait for all."""
        if self._joined and self.connection.remote is not None:
            self.connection.remote.exchange.abort(why)
        else:
            end_process(why)

    @override
    def sampled_loader(self, stage: str, data: Batch, sampler: Any, *args: Any, **options: Any) -> Any:
        _ = self.connection.open
        return super().sampled_loader(stage, data, sampler, *args, tables=self.tables, **options)

    def _order(self, stage: str, num_seeds: int, drop_last: bool, replicas: int, rank: int) -> DistributedSampler[int]:
        if stage == "train" and self._elastic is not None:
            return self._elastic.begin(
                self.trainer, num_seeds, self.batch_size, num_replicas=replicas, rank=rank, shuffle=self.shuffle,
                seed=self.seed % 2**62, drop_last=drop_last,
            )  # fmt: skip
        if stage != "train" or self.order == "global":
            return super()._order(stage, num_seeds, drop_last, replicas, rank)
        return OwnSeedsOrder(
            self.owners_of_seeds(replicas), num_replicas=replicas, rank=rank, shuffle=self.shuffle,
            seed=self.seed % 2**62, drop_last=drop_last,
        )  # fmt: skip

    @property
    def _replica(self) -> tuple[int, int]:
        if self.trainer is None and self.connection.remote is not None:
            return self.connection.remote.exchange.ranks, self.connection.remote.exchange.rank
        return super()._replica

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside Lightning's own state; all ranks must call it, as Lightning does."""
        state = super().state_dict()
        return state if self._elastic is None else {**state, "elastic": self._elastic.state(self.trainer)}

    def _first_batch(self) -> int:
        first = super()._first_batch()
        if self._elastic is not None:
            self._elastic.check(first)
        return first

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the interrupted run stood."""
        ranks = len(state_dict.get("rng", []))
        if self._elastic is not None:
            self._elastic.load(state_dict.get("elastic", {}))
        mid_epoch = state_dict.get("position", {}).get("mid_epoch", False)
        if ranks != self._world_size and mid_epoch:
            if self._elastic is None or not state_dict.get("elastic"):
                given = f"the checkpoint is from within an epoch of {ranks} ranks, and there are {self._world_size}"
                raise ValueError(f"{given}: elastic=True (in both runs) goes on with any number")
            if any(state_dict.get("gradients", [])):
                held = f"the checkpoint holds gradients that {ranks} ranks were accumulating"
                raise ValueError(f"{held}, which {self._world_size} ranks cannot share: resume from one after a step")
        super().load_state_dict(state_dict)

    def _own_share(self, stage: str, count: int) -> Tensor:
        """Return which seeds of a stage this rank evaluates, of exact outputs, int64 ``[n]``."""
        self.check_count(stage, count)
        share = torch.tensor([*self._order(stage, count, False, *self._replica)], dtype=torch.int64)
        if not share.numel():
            ranks = self.connection.open.exchange.ranks
            raise ValueError(
                f"inference='full': each of {ranks} ranks needs a seed of the {stage} split, which has {count}"
            )
        return share

    def _whole_batch(self, wanted: dict[Any, Tensor], kind: StoreType = None, **more: object) -> DataLoader[Batch]:
        """Return a batch that asks for exact outputs of some nodes of each type, which all ranks compute together."""
        assert isinstance(self.inference, FullInference)
        remote, typed = self.connection.open, self.partition.typed
        batch: Batch = HeteroData() if typed else Data()
        for name, ids in wanted.items():
            number = self.partition.number.get(name, 0)
            attributes = [key for key in self.partition.nodes[number].attributes if key != "x"]
            rows = remote.node_rows(number, ids.numpy(), attributes)
            (batch[name] if typed else batch).update({"n_id": ids, **rows})
        (batch[kind] if typed else batch).update(more)
        if not typed:
            batch.x = nothing([wanted[None].numel(), *self.data.x.shape[1:]], self.data.x.dtype)
            batch.edge_index = Elsewhere(self.partition.edges[0].count)
            if "edge_weight" in self.partition.edges[0].attributes:
                batch.edge_weight = nothing([0], torch.float32)  # they are read with the edges
        batch.inference = InParts.of(self.inference, remote=remote, published=self._published, wanted=wanted)
        return only_batch(batch)

    def owners_of_seeds(self, ranks: int) -> Tensor:
        """Return which rank has each training seed (or edge's target) in its part; ranks that share one take turns."""
        node_type, ids = self._places_of_seeds()
        part = self.partition.owner[self.partition.number.get(node_type, 0)].numpy()[ids.numpy()]
        owners = np.empty(part.size, np.int64)
        for number, held in enumerate(holders(self.partition.parts, ranks)):
            where = np.flatnonzero(part == number)
            owners[where] = np.array(held)[np.arange(where.size) % len(held)]
        return torch.from_numpy(owners)

    def _places_of_seeds(self) -> tuple[StoreType, Tensor]:
        raise NotImplementedError


class PartitionedDataModule(_OnParts, NeighborDataModule):
    """A :class:`~lightning_gnn.NeighborDataModule` over a graph that ``lgnn partition`` has cut into parts.

    Each rank reads its own part, and asks the others for the rest. For given seeds and key the mini-batches are those
    of one machine with the whole graph, bit for bit, for any number of parts and ranks.

    Args:
        root: The folder.
        *args: Seeds for training, validation, testing and prediction, as for
            :class:`~lightning_gnn.NeighborDataModule`, by the ids of the whole graph; by default those of its masks.
        topology: ``"parts"``: each rank has the in-edges of its nodes, and hops ask the others; ``"whole"``: each has
            all edges and their attributes in memory, only the nodes' attributes are asked for.
        order: Of the training seeds. ``"global"``: that of one machine; ``"local"``: each rank draws from its own part,
            so that far fewer rows are asked for; where it has fewer seeds than others, some come twice.
        elastic: Take each seed once per epoch, and let a run that was stopped go on with any number of ranks, also
            within an epoch. For ``order="global"``.
        cache: Bytes for rows of other parts, such as ``"2GB"``: those that the coming mini-batches read most often.
        count_batches: Mini-batches of the coming epoch to count that by.
        silence: Seconds without a sign of life after which a rank counts as lost.
        seed: Start of the random streams; by default that of rank 0.
        num_workers: Threads that prepare mini-batches ahead, and with it ask other ranks.
        **kwargs: Further arguments of :class:`~lightning_gnn.NeighborDataModule`, of which those that go over the whole
            graph are refused, but for ``inference="full"``: each rank computes the outputs of its own nodes layer by
            layer, and has a batch of its share of the seeds.

    Raises:
        FileNotFoundError: There is no partitioned graph.
        ValueError: A damaged file, an option that is unknown or cannot work, or as for ``NeighborDataModule``.

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

    def _with_splits(self, given: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        for place, stage in enumerate(SPLITS):  # each has its times behind it
            found = self.partition.split(stage)
            if found is not None and len(given) <= 2 * place and kwargs.get(f"input_{stage}_nodes") is None:
                name, mask = found
                kwargs[f"input_{stage}_nodes"] = mask if name is None else (name, mask)
        return kwargs

    def _full_loader(self, stage: str) -> DataLoader[Batch]:
        """Return a batch of this rank's share of the seeds, in the order of one machine; all make their outputs."""
        count, seeds = self._count(stage), self._seeds(stage)
        kind, nodes = seeds if self.partition.typed else (None, seeds)
        wanted = torch.arange(count) if nodes is None else as_ids(nodes)
        wanted = wanted[self._own_share(stage, count)]
        return self._whole_batch({kind: wanted}, kind, batch_size=wanted.numel())

    def _places_of_seeds(self) -> tuple[StoreType, Tensor]:
        nodes = self._nodes["train"]
        return self._types["train"], nodes.nonzero().view(-1) if nodes.dtype == torch.bool else nodes


class PartitionedLinkDataModule(_OnParts, LinkDataModule):
    """A :class:`~lightning_gnn.LinkDataModule` over a graph that ``lgnn partition`` has cut into parts.

    It takes what :class:`PartitionedDataModule` does; edges are given by the ids of the whole graph, by default those
    that the graph was partitioned with (``lgnn partition task=link``, or ``task=recommend``, whose edges have times).
    With ``order="local"`` each rank trains on the edges into the nodes of its part.

    Raises:
        FileNotFoundError: There is no partitioned graph.
        ValueError: There are no training edges, or as for :class:`PartitionedDataModule`.

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

    def _with_splits(self, given: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        edges = [*given[::3], *(value for name, value in kwargs.items() if re.fullmatch("input_.*_edges", name))]
        if any(isinstance(value, tuple) and all(isinstance(part, str) for part in value) for value in edges):
            raise ValueError("an edge type alone stands for all of its edges, which no rank has: give the edges too")
        for place, stage in enumerate(("train", "val", "test")):  # each has its labels and times behind it
            if len(given) <= 3 * place and kwargs.get(f"input_{stage}_edges") is None:
                kept, kind = self.partition.links(stage), self.partition.link_type
                kwargs[f"input_{stage}_edges"] = kept if kind is None or kept is None else (kind, kept)
                for what in ("labels", "time"):
                    if (values := self.partition.links(f"{stage}_{what}")) is not None:
                        kwargs[f"input_{stage}_{what}"] = values
        if not given and kwargs.get("input_train_edges") is None:
            fix = "so give those to train on, or partition with some (lgnn partition task=link, or task=recommend)"
            raise ValueError(f"input_train_edges is missing: no rank has all edges of the graph, {fix}")
        return kwargs

    def full_loader(self, name: str, kind: StoreType = None, **more: Tensor) -> DataLoader[Batch]:
        """Return a batch of this rank's share of a stage's labeled edges, in the order of one machine."""
        edges = more.pop("edge_label_index")
        share = self._own_share(name, edges.size(1))
        types, wanted = (None, None) if kind is None else (kind[0], kind[2]), {}
        for name in dict.fromkeys(types):
            own = edges[[end for end, of in enumerate(types) if of == name]][:, share]
            wanted[name] = own.unique()  # type: ignore[no-untyped-call]
        ends = [torch.searchsorted(wanted[name], edges[end, share]) for end, name in enumerate(types)]
        more = {key: value[share] for key, value in more.items()}
        return self._whole_batch(wanted, kind, edge_label_index=torch.stack(ends), **more)

    def _places_of_seeds(self) -> tuple[StoreType, Tensor]:
        edges, name = self._edges["train"][0], self._types["train"]
        assert edges is not None
        return None if name is None else name[2], edges[1]

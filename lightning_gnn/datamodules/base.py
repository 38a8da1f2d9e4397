"""Base class of the mini-batch DataModules: options, loaders per stage, exact evaluation, and the position of a run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler
from torch_geometric.typing import EdgeType, NodeType
from typing_extensions import override

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.datamodules.disk import DiskFeatureConfig
from lightning_gnn.datamodules.full_batch import FullBatch, inference_settings, make_hetero_batch, only_batch
from lightning_gnn.datamodules.options import (
    SamplingOptions,
    StorageOptions,
    check_sampler,
    evaluation_keywords,
    pop_options,
    training_keywords,
    with_overrides,
)
from lightning_gnn.datamodules.resumable import ResumableDataModule
from lightning_gnn.features.table import with_feature_dtype
from lightning_gnn.graph.adjacency import with_adj_t_values
from lightning_gnn.graph.checks import check_edge_data, check_hetero_data, check_node_data
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.edge_attributes import as_times
from lightning_gnn.loading.batch import Batch
from lightning_gnn.loading.loaders import PipelineLoader
from lightning_gnn.loading.seed_order import EvaluationOrder, TrainingOrder, UnshardedOrder
from lightning_gnn.nn.inference import FullInference
from lightning_gnn.runtime.lightning import TrainerStatus, rank_zero_warn
from lightning_gnn.runtime.messages import OF_NEWER_TORCH, whole_number
from lightning_gnn.sampling.neighbor import Fanouts, NeighborSampler, nonuniform_features

LOADER_IDS = {"train": 0, "val": 1, "test": 2, "predict": 3}
"""Part of the random key of each mini-batch, so that the loaders of a run use different random numbers."""
Loader: TypeAlias = PipelineLoader | DataLoader[FullBatch]  # of mini-batches, or of the whole graph as one batch
_PER_SEED_EDGE_MASKS = ("time_attr", "exclude_seed_edges")
"""Sampler options that hide edges from some seeds, which full-graph inference cannot do."""


class MiniBatchDataModule(ResumableDataModule):
    """Builds threaded loaders whose mini-batches depend only on (seed, rank, loader, epoch, batch number).

    A resumed run gets its position from Lightning's loop, so the loaders are stateless. (Lightning would drop loader
    state as soon as ``configure_optimizers`` reads ``trainer.estimated_stepping_batches``.)

    A subclass defines :meth:`num_seeds`, :meth:`sampled_loader` and :meth:`full_loader`. A system with another sampler
    overrides :meth:`make_sampler`.
    """

    kind: ClassVar[str] = "node"
    """Type of the seeds: ``"node"`` or ``"link"``."""
    needs_all_ranks = False  # whether evaluation requires all ranks
    sampling_options: SamplingOptions | None = SamplingOptions()
    """Options of neighbor sampling. The class attribute is None for a system without it, which then rejects them."""

    def __init__(
        self,
        data: Batch,
        sampler: BaseSampler | None,
        seed: int | None,
        batch_size: int,
        num_neighbors: Fanouts | None,
        inference: str | FullInference,
        eval_loader_kwargs: dict[str, Any] | None,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        # Divide the keywords among sampling, storage and the loaders.
        options = {**options, "num_neighbors": num_neighbors, "batch_size": batch_size}
        sampling = pop_options(SamplingOptions, options)
        if self.sampling_options is not None:
            self.sampling_options = sampling
        elif given := sampling.given():
            raise TypeError(f"unknown option {min(given)}: {type(self).__name__} does not sample neighbors; omit it")
        self.storage_options = storage = pop_options(StorageOptions, options)
        self.share_memory = storage.share_memory
        self.inference = inference_settings(inference)
        self.seed = torch.initial_seed() if seed is None else whole_number(seed, "seed")
        self.loader_kwargs = training_keywords(type(self), self.kind, options)
        self.shuffle = self.loader_kwargs.pop("shuffle", None) is not False
        own, overrides = evaluation_keywords(type(self), self.kind, eval_loader_kwargs)
        not_shared = ("sampler", "batch_sampler", "drop_last")
        self.eval_loader_kwargs = {k: v for k, v in self.loader_kwargs.items() if k not in not_shared} | own
        self._has_eval_batch_size = "batch_size" in own
        self.position, self.evaluation = EpochPosition(self), Evaluation(self)

        # Check the graph, and make the samplers; a user's sampler ignores the sampling options.
        if isinstance(data, Data | HeteroData):
            data = with_adj_t_values(data)
        if is_hetero := isinstance(data, HeteroData):
            check_hetero_data(data, storage.check_features)
        else:
            check_node_data(data, storage.check_features)
        if sampler is not None:
            check_sampler(sampler, self.kind, sampling.given())
        elif self.sampling_options is not None and num_neighbors is None:
            raise ValueError("num_neighbors is missing; give one fanout per hop, such as [15, 10]")
        self.graph_sampler = self.make_sampler(data) if sampler is None else sampler
        hiding = [name for name in nonuniform_features(self.graph_sampler) if name in _PER_SEED_EDGE_MASKS]
        if self.inference is not None and hiding:
            raise ValueError(
                f"inference='full' uses all edges at once, so it cannot be combined with {hiding[0]}; omit one of them"
            )
        self.eval_graph_sampler = with_overrides(self.graph_sampler, overrides)

        # Convert the features, or set them up to be read from disk.
        if not is_hetero:
            check_edge_data(data)
        self.data = with_feature_dtype(data, storage.feature_dtype, storage.check_features)
        self.disk: DiskFeatureConfig | None = None
        if storage.memory is not None:
            self.disk = DiskFeatureConfig(self.data, storage.memory, storage.lookahead, storage.store)
            self.data = self.disk.add_mapped_features(self.data)

    def make_sampler(self, data: Batch) -> BaseSampler:
        """Create the sampler of the graph if the user gives none: neighbor sampling with :attr:`sampling_options`.

        Called once, at construction, when seed and options are set; :attr:`data` is set later.
        """
        assert self.sampling_options is not None
        return NeighborSampler(data, seed=self.seed, **self.sampling_options.given())

    def sampler(self, stage: str) -> BaseSampler:
        """Return the sampler of a stage: in evaluation, one with the overrides of ``eval_loader_kwargs``."""
        return self.graph_sampler if stage == "train" else self.eval_graph_sampler

    def num_seeds(self, stage: str) -> int:
        """Return the number of seeds (or labeled edges) of a stage, those of all ranks together."""
        raise NotImplementedError

    @override
    def make_loader(self, stage: str) -> Loader:
        if stage != "train" and self.inference is not None:
            self.position.check(stage, self.num_seeds(stage))
            return self.full_loader(stage)
        return self.sampled_loader(stage, self.data, self.sampler(stage), **self.disk_options(stage))

    def sampled_loader(self, stage: str, data: Batch, sampler: BaseSampler, **options: Any) -> PipelineLoader:
        """Return a loader of sampled mini-batches with the seeds, order, keys and rank of a stage.

        Its arguments are those of :meth:`loader_arguments`, which ``options`` replace.
        """
        raise NotImplementedError

    def full_loader(self, stage: str) -> DataLoader[FullBatch]:
        """Return the loader of a stage with seeds for exact evaluation, such as one of :attr:`evaluation`."""
        raise NotImplementedError

    def loader_arguments(self, stage: str, num_seeds: int) -> dict[str, Any]:
        """Return the keyword arguments of a stage's loader."""
        position = self.position
        position.check(stage, num_seeds)
        warnings.filterwarnings("ignore", OF_NEWER_TORCH, FutureWarning)
        warnings.filterwarnings("ignore", ".*does not have many workers.*")  # workers are threads
        if position.is_running:
            warnings.filterwarnings("ignore", ".*your dataloader is not resumable.*")  # this DataModule resumes it
        training, (replicas, rank) = stage == "train", position.replica()
        kwargs = dict(self.loader_kwargs if training else self.eval_loader_kwargs)
        kwargs.update(seed=self.seed, rank=rank, loader_id=LOADER_IDS[stage])
        kwargs["epoch"] = position.epoch if training else _evaluation_epoch
        if training:
            kwargs["first_batch"] = position.first_batch
        if "sampler" not in kwargs and "batch_sampler" not in kwargs:
            make = partial(position.order, stage, num_seeds, kwargs.get("drop_last", False))
            # A loader requested without a running Trainer may be passed to one, or to Fabric, which then shards it.
            shard_later = replicas == 1 and not position.is_running
            kwargs["sampler"] = UnshardedOrder(make) if shard_later else make(replicas, rank)
        if training and hasattr(kwargs.get("sampler"), "set_epoch"):
            kwargs["sampler"].set_epoch(position.passes)
        if "batch_sampler" in kwargs:
            kwargs.pop("batch_size")
        return kwargs

    def disk_options(self, stage: str) -> dict[str, Any]:
        """Return the options of a loader that reads features from disk; empty if all are in memory.

        They are ``tables`` by attribute, among them the user's, ``lookahead`` and, in training, ``is_last``. The first
        call divides the memory: it samples a mini-batch of this stage.
        """
        if self.disk is None:
            return {}
        own = (self.loader_kwargs if stage == "train" else self.eval_loader_kwargs).get("tables") or {}
        tables = self.disk.tables(lambda: self.sampled_loader(stage, self.data, self.sampler(stage)))
        more = {"is_last": self.position.is_last} if stage == "train" else {}
        return {"tables": {**own, **tables}, "lookahead": self.disk.lookahead, **more}

    @property
    def num_neighbors(self) -> list[int] | None:
        """Training fanout of each hop; None for a custom sampler without fanouts."""
        return getattr(self.graph_sampler, "num_neighbors", None)

    @property
    def batch_size(self) -> int:
        """Seeds (or labeled edges) per mini-batch; Lightning's ``Tuner.scale_batch_size`` sets it.

        Validation, testing and prediction use it too, unless ``eval_loader_kwargs`` sets another one.
        """
        size: int = self.loader_kwargs["batch_size"]
        return size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        batch_size = whole_number(batch_size, "batch_size", 1)
        if "loader_kwargs" not in self.__dict__:
            return  # a subclass sets its own batch_size before our __init__
        if not self._has_eval_batch_size:
            self.eval_loader_kwargs["batch_size"] = batch_size
        self.loader_kwargs["batch_size"] = batch_size

    @cached_property
    def compressed_graph(self) -> CompressedGraph:
        """The whole homogeneous graph without the sampler's weights, for exact evaluation; made when first read."""
        topology = getattr(self.graph_sampler, "whole_graph", getattr(self.graph_sampler, "graph", None))
        return CompressedGraph.from_graph(topology if isinstance(topology, CSCGraph) else CSCGraph.from_data(self.data))

    @override
    def describe(self) -> str:
        fanouts = [] if self.num_neighbors is None else [f"fanouts {self.num_neighbors}"]
        return ", ".join([*fanouts, f"batch {self.batch_size}", *["full inference"] * (self.inference is not None)])

    def large_arrays(self) -> dict[str, object]:
        """Return graph and features, by name."""
        graphs = {"graph": getattr(self.graph_sampler, "graph", None), "compressed": vars(self).get("compressed_graph")}
        return {"data": self.data, **graphs}

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume in addition to Lightning's. All ranks must call this."""
        return {"seed": self.seed, "batch_size": self.batch_size, **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the seed of the interrupted run now, and its other state when training starts."""
        super().load_state_dict(state_dict)
        self.seed = state_dict["seed"]
        self.position.saved_batch_size = state_dict.get("batch_size")


class Evaluation:
    """Exact evaluation: batches of the whole graph, created when first requested."""

    def __init__(self, datamodule: MiniBatchDataModule) -> None:
        self.datamodule = datamodule
        self._batches: dict[str, FullBatch] = {}

    def loader(self, name: str, kind: NodeType | EdgeType | None = None, **more: Tensor) -> DataLoader[FullBatch]:
        """Return a loader of the whole graph as one batch; loaders with the same name share the batch.

        ``more`` are attributes of the batch: of the type ``kind`` in a heterogeneous graph.
        """
        data, settings = self.datamodule.data, self.datamodule.inference
        assert settings is not None
        if name not in self._batches and isinstance(data, HeteroData):
            self._batches[name] = make_hetero_batch(data, settings)
            self._batches[name][kind].update(more)
        if name not in self._batches:
            graph = self.datamodule.compressed_graph
            self._batches[name] = FullBatch.from_data(data, graph, runner=settings, **more)
        return only_batch(self._batches[name])


class EpochPosition:
    """The part of an epoch that a loader yields: its order, this process's share, and where a resumed run continues.

    Loaders call ``epoch``, ``is_last`` and ``first_batch`` when an iteration begins.
    """

    def __init__(self, datamodule: MiniBatchDataModule) -> None:
        self.datamodule = datamodule
        self.passes = 0  # over the training set, without a Trainer
        self.saved_batch_size: int | None = None  # of the checkpoint to resume from

    @property
    def is_running(self) -> bool:
        """Whether a Trainer is running with the DataModule, and so requests the loaders."""
        trainer = self.datamodule.trainer
        return trainer is not None and trainer.state.status == TrainerStatus.RUNNING

    def replica(self) -> tuple[int, int]:
        """Return the number of replicas that seeds are sharded across, and this process's index, by the strategy."""
        strategy = None if self.datamodule.trainer is None else self.datamodule.trainer.strategy
        kwargs = getattr(strategy, "distributed_sampler_kwargs", {})
        return kwargs.get("num_replicas", self.datamodule._world_size), kwargs.get("rank", self.datamodule._rank)

    def check(self, stage: str, num_seeds: int) -> None:
        """Raise a ValueError if a split is empty or ``drop_last`` would drop all of it."""
        if num_seeds == 0:
            raise ValueError(
                f"the {stage} split is empty; give input_{stage}_nodes (or edges), or a mask with true entries"
            )
        options = self.datamodule.loader_kwargs if stage == "train" else self.datamodule.eval_loader_kwargs
        has_sampler = "sampler" in options or "batch_sampler" in options
        replicas, _ = self.replica()
        if options.get("drop_last") and not has_sampler and num_seeds // replicas < options["batch_size"]:
            raise ValueError(
                f"drop_last=True leaves no mini-batch: the {stage} split has {num_seeds} seeds for {replicas} "
                f"process(es), fewer than batch_size={options['batch_size']} each"
            )

    def order(self, stage: str, num_seeds: int, drop_last: bool, replicas: int, rank: int) -> DistributedSampler[int]:
        """Return the order of a stage's seeds, of which this process takes the share ``rank`` of ``replicas``."""
        training = stage == "train"
        order_class = TrainingOrder if training else EvaluationOrder
        if not training and num_seeds < replicas:
            raise ValueError(
                f"the {stage} split has {num_seeds} seeds for {replicas} processes, and a process without seeds would "
                "block the others; use more seeds, or evaluate with fewer processes"
            )
        return order_class(
            range(num_seeds),  # type: ignore[arg-type]
            num_replicas=replicas,
            rank=rank,
            shuffle=training and self.datamodule.shuffle,
            seed=self.datamodule.seed % 2**62,
            drop_last=drop_last and training and replicas > 1,
        )

    def epoch(self, number: int) -> int:
        """Return the epoch of an iteration over the training set: the Trainer's if it is training, else ``number``."""
        trainer = self.datamodule.trainer
        if trainer is not None and trainer.training:
            return trainer.current_epoch
        self.passes = number + 1
        return number

    def is_last(self, epoch: int) -> bool:
        """Return whether this is the last epoch."""
        trainer = self.datamodule.trainer
        max_epochs = None if trainer is None or not trainer.training else trainer.max_epochs
        return max_epochs is not None and 0 <= max_epochs <= epoch + 1

    def first_batch(self) -> int:
        """Return the number of this epoch's batches to skip, from Lightning's loop."""
        datamodule, trainer = self.datamodule, self.datamodule.trainer
        if trainer is None or not trainer.training:
            return 0
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        first: int = progress.current.ready
        if datamodule._resumed_at is None:
            datamodule._resumed_at = progress.total.ready
        if first and progress.total.ready != datamodule._resumed_at:
            return 0  # the user iterates over the loader; only the Trainer's iteration skips batches
        is_mid_epoch, size = 0 < first < trainer.num_training_batches, datamodule.batch_size
        if is_mid_epoch and self.saved_batch_size not in (None, size):
            rank_zero_warn(
                f"the checkpoint was saved within an epoch with batch_size={self.saved_batch_size}, but this run "
                f"has batch_size={size}: the epoch continues after {first} mini-batches of the new size, so "
                "that some of its seeds are trained on twice or not at all"
            )
        self.saved_batch_size = None
        datamodule.restore_random_state()  # needed if training runs without Lightning's hooks
        datamodule.set_order_state(first)
        return first


def _evaluation_epoch(number: int) -> int:
    return 0


def seed_times(
    sampler: BaseSampler, stage: str, time: Tensor | Sequence[float], count: int | None, what: str
) -> Tensor:
    """Return the times of the seeds of a stage as a tensor."""
    name = f"input_{stage.removesuffix('ict')}_time"
    if not getattr(sampler, "is_temporal", True):
        raise ValueError(f"{name} requires edges with times: set time_attr")
    if count is None:
        raise ValueError(f"{name} is given without its {what}")
    time = as_times(time, name)
    if time.shape != (count,):
        raise ValueError(f"{name} has the shape {list(time.shape)}, but there are {count} {what}")
    return time

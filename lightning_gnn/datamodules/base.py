"""Base class of the mini-batch DataModules: options, seed order, ranks, and resuming."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.datamodules.disk import DiskFeatureConfig
from lightning_gnn.datamodules.full_batch import FullBatch, inference_settings, make_hetero_batch, only_batch
from lightning_gnn.datamodules.options import SamplingOptions, StorageOptions
from lightning_gnn.datamodules.resumable import ResumableDataModule
from lightning_gnn.features.disk_features import DiskFeatures
from lightning_gnn.features.table import with_feature_dtype
from lightning_gnn.graph.adjacency import with_adj_t_values
from lightning_gnn.graph.checks import check_edge_data, check_hetero_data, check_node_data
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.graph.edge_attributes import as_times
from lightning_gnn.graph.stores import AttributeName
from lightning_gnn.loading.batch import Batch
from lightning_gnn.loading.loaders import LinkLoader, NodeLoader, PipelineLoader
from lightning_gnn.loading.options import validate_options
from lightning_gnn.loading.seed_order import EvaluationOrder, TrainingOrder, UnshardedOrder
from lightning_gnn.nn.inference import FullInference
from lightning_gnn.runtime.lightning import TrainerStatus, rank_zero_warn
from lightning_gnn.runtime.messages import OF_NEWER_TORCH, keywords_of, true_or_false, whole_number
from lightning_gnn.sampling.neighbor import Fanouts, NeighborSampler, nonuniform_features

LOADER_IDS = {"train": 0, "val": 1, "test": 2, "predict": 3}
"""Part of the random key of each mini-batch, so that the loaders of a run use different random numbers."""
Loader: TypeAlias = PipelineLoader | DataLoader[FullBatch]  # of mini-batches, or of the whole graph as one batch
_LOADERS = {"node": NodeLoader, "link": LinkLoader}
_SAMPLER_OPTIONS = ("num_neighbors", "replace", "disjoint", "temporal_strategy", "time_window", "subgraph_type")
_PER_SEED_EDGE_MASKS = ("time_attr", "exclude_seed_edges")
"""Sampler options that hide edges from some seeds, which full-graph inference cannot do."""
_RESERVED = {
    "data", "node_sampler", "link_sampler", "input_nodes", "input_id", "edge_label_index", "edge_label", "seed", "rank",
    "loader_id", "first_batch", "epoch", "loader_kwargs",
}  # fmt: skip


class MiniBatchDataModule(ResumableDataModule):
    """Builds threaded loaders whose mini-batches depend only on (seed, rank, loader, epoch, batch number).

    A resumed run gets its position from Lightning's loop, so the loaders are stateless. (Lightning would drop loader
    state as soon as ``configure_optimizers`` reads ``trainer.estimated_stepping_batches``.)
    """

    kind: ClassVar[str] = "node"
    """Type of the seeds: ``"node"`` or ``"link"``."""
    needs_all_ranks = False  # whether evaluation requires all ranks
    _disk: DiskFeatureConfig | None = None
    _checkpoint_batch_size: int | None = None

    def __init__(
        self,
        seed: int | None,
        batch_size: int,
        num_neighbors: Fanouts | None,
        inference: str | FullInference,
        eval_loader_kwargs: dict[str, Any] | None,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        sampling = {"num_neighbors": num_neighbors}
        if isinstance(options.get("sampler"), str):  # a neighbor sampler, not a seed sampler
            sampling["sampler"] = options.pop("sampler")
        seed_sampler = {"sampler": options.pop("sampler")} if "sampler" in options else {}
        options |= sampling
        self.sampling_options = SamplingOptions.pop_from(options)
        self.storage_options = StorageOptions.pop_from(options)
        self.share_memory = self.storage_options.share_memory
        self.inference = inference_settings(inference)
        self._full: dict[str, FullBatch] = {}
        self._graph: CompressedGraph | None = None
        self.seed = torch.initial_seed() if seed is None else whole_number(seed, "seed")
        loading = {"batch_size": batch_size, **options, **seed_sampler}
        self.loader_kwargs = _training_keywords(type(self), self.kind, loading)
        self.shuffle = self.loader_kwargs.pop("shuffle", None) is not False
        own, self.sampler_overrides = _evaluation_keywords(type(self), self.kind, eval_loader_kwargs)
        not_shared = ("sampler", "batch_sampler", "drop_last")
        self.eval_loader_kwargs = {k: v for k, v in self.loader_kwargs.items() if k not in not_shared} | own
        self._has_eval_batch_size = "batch_size" in own
        self._passes = 0

    def _set_graph(self, data: Batch, sampler: BaseSampler | None) -> None:
        """Validate and store the graph and the user's sampler, or a sampler created from the options."""
        sampling, storage = self.sampling_options, self.storage_options
        if isinstance(data, Data | HeteroData):
            data = with_adj_t_values(data)
        if is_hetero := isinstance(data, HeteroData):
            check_hetero_data(data, storage.check_features)
        else:
            check_node_data(data, storage.check_features)

        # A user's sampler ignores the sampling options.
        if sampler is not None:
            _validate_sampler(sampler, self.kind, sampling.given())
        elif sampling.num_neighbors is None:
            raise ValueError("num_neighbors is missing; give one fanout per hop, such as [15, 10]")
        else:
            sampler = self.make_sampler(data, sampling)
        hiding = [name for name in nonuniform_features(sampler) if name in _PER_SEED_EDGE_MASKS]
        if self.inference is not None and hiding:
            raise ValueError(
                f"inference='full' uses all edges at once, so it cannot be combined with {hiding[0]}; omit one of them"
            )

        # Convert the features, or set them up to be read from disk.
        if not is_hetero:
            check_edge_data(data)
        self.data = with_feature_dtype(data, storage.feature_dtype, storage.check_features)
        if storage.memory is not None:
            self._disk = DiskFeatureConfig(self.data, storage.memory, storage.lookahead, storage.store)
            self.data = self._disk.add_mapped_features(self.data)
        self.graph_sampler = sampler
        self.eval_graph_sampler = _apply_overrides(sampler, self.sampler_overrides)

    def make_sampler(self, data: Batch, options: SamplingOptions) -> BaseSampler:
        """Create the sampler for a graph if the user gives none."""
        return NeighborSampler(data, seed=self.seed, **options.given())

    def _disk_tables(self, stage: str) -> dict[AttributeName, DiskFeatures]:
        """Return the tables on disk, by attribute."""
        if self._disk is None:
            return {}
        return self._disk.tables(lambda: self.sampled_loader(stage, self.data, self._sampler_of(stage)))

    def plan_disk(self) -> str | None:
        """Return a description of the features on disk and their memory; None if all are in memory."""
        if self._disk is None:
            return None
        self._disk_tables("train")
        return str(self._disk)

    def _from_disk(self, stage: str) -> dict[str, Any]:
        """Return the options of a loader that reads features from disk."""
        if self._disk is None:
            return {}
        own = (self.loader_kwargs if stage == "train" else self.eval_loader_kwargs).get("tables") or {}
        more = {"is_last": self._is_last} if stage == "train" else {}
        return {"tables": {**own, **self._disk_tables(stage)}, "lookahead": self._disk.lookahead, **more}

    def _is_last(self, epoch: int) -> bool:
        """Return whether this is the last epoch."""
        max_epochs = None if self.trainer is None or not self.trainer.training else self.trainer.max_epochs
        return max_epochs is not None and 0 <= max_epochs <= epoch + 1

    def _validate_times(self, stage: str, time: Tensor | Sequence[float], count: int | None, what: str) -> Tensor:
        """Return the times of the seeds of a stage as a tensor."""
        name = f"input_{stage.removesuffix('ict')}_time"
        if not getattr(self.graph_sampler, "is_temporal", True):
            raise ValueError(f"{name} requires edges with times: set time_attr")
        if count is None:
            raise ValueError(f"{name} is given without its {what}")
        time = as_times(time, name)
        if time.shape != (count,):
            raise ValueError(f"{name} has the shape {list(time.shape)}, but there are {count} {what}")
        return time

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

    def train_dataloader(self) -> Loader:
        """Return shuffled mini-batches of the training seeds (or labeled edges)."""
        return self.make_loader("train")

    def val_dataloader(self) -> Loader:
        """Return mini-batches for validation, in order, or the whole graph; see ``inference``."""
        return self.make_loader("val")

    def test_dataloader(self) -> Loader:
        """Return mini-batches for testing, in order, or the whole graph."""
        return self.make_loader("test")

    def predict_dataloader(self) -> Loader:
        """Return mini-batches for prediction, in order, or the whole graph."""
        return self.make_loader("predict")

    def make_loader(self, stage: str) -> Loader:
        """Return the loader of a stage: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``."""
        raise NotImplementedError

    def _count(self, stage: str) -> int:
        """Return the number of seeds of a stage."""
        raise NotImplementedError

    def sampled_loader(self, stage: str, data: Batch, sampler: BaseSampler, **options: Any) -> PipelineLoader:
        """Return a loader of sampled mini-batches with the seeds, order, keys and rank of a stage."""
        raise NotImplementedError

    def _sampler_of(self, stage: str) -> BaseSampler:
        return self.graph_sampler if stage == "train" else self.eval_graph_sampler

    def loader_arguments(self, stage: str, num_seeds: int) -> dict[str, Any]:
        """Return the keyword arguments of a stage's loader."""
        self.check_count(stage, num_seeds)
        warnings.filterwarnings("ignore", OF_NEWER_TORCH, FutureWarning)
        warnings.filterwarnings("ignore", ".*does not have many workers.*")  # workers are threads
        if self._running:
            warnings.filterwarnings("ignore", ".*your dataloader is not resumable.*")  # this DataModule resumes it
        training = stage == "train"
        kwargs = dict(self.loader_kwargs if training else self.eval_loader_kwargs)
        kwargs.update(seed=self.seed, rank=self._replica[1], loader_id=LOADER_IDS[stage])
        kwargs["epoch"] = self._training_epoch if training else _evaluation_epoch
        if training:
            kwargs["first_batch"] = self._first_batch
        if "sampler" not in kwargs and "batch_sampler" not in kwargs:
            make = partial(self._order, stage, num_seeds, kwargs.get("drop_last", False))
            replicas, rank = self._replica
            # A loader requested without a running Trainer may be passed to one, or to Fabric, which then shards it.
            shard_later = replicas == 1 and not self._running
            kwargs["sampler"] = UnshardedOrder(make) if shard_later else make(replicas, rank)
        if training and hasattr(kwargs.get("sampler"), "set_epoch"):
            kwargs["sampler"].set_epoch(self._passes)
        if "batch_sampler" in kwargs:
            kwargs.pop("batch_size")
        return kwargs

    def check_count(self, stage: str, num_seeds: int) -> None:
        """Raise a ValueError if a split is empty or ``drop_last`` would drop all of it."""
        if num_seeds == 0:
            raise ValueError(
                f"the {stage} split is empty; give input_{stage}_nodes (or edges), or a mask with true entries"
            )
        options = self.loader_kwargs if stage == "train" else self.eval_loader_kwargs
        has_sampler = "sampler" in options or "batch_sampler" in options
        replicas, _ = self._replica
        if options.get("drop_last") and not has_sampler and num_seeds // replicas < options["batch_size"]:
            raise ValueError(
                f"drop_last=True leaves no mini-batch: the {stage} split has {num_seeds} seeds for {replicas} "
                f"process(es), fewer than batch_size={options['batch_size']} each"
            )

    def full_loader(self, name: str, kind: NodeType | EdgeType | None = None, **more: Tensor) -> DataLoader[FullBatch]:
        """Return a loader of the whole graph as one batch; loaders with the same name share the batch."""
        if name not in self._full and isinstance(self.data, HeteroData):
            assert self.inference is not None
            self._full[name] = make_hetero_batch(self.data, self.inference)
            self._full[name][kind].update(more)
        if name not in self._full:
            if self._graph is None:
                topology = getattr(self.graph_sampler, "whole_graph", getattr(self.graph_sampler, "graph", None))
                topology = topology if isinstance(topology, CSCGraph) else CSCGraph.from_data(self.data)
                self._graph = CompressedGraph.from_graph(topology)
            self._full[name] = FullBatch.from_data(self.data, self._graph, runner=self.inference, **more)
        return only_batch(self._full[name])

    def large_arrays(self) -> dict[str, object]:
        """Return graph and features, by name."""
        return {"data": self.data, "graph": getattr(self.graph_sampler, "graph", None), "compressed graph": self._graph}

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume in addition to Lightning's. Collective: every rank must call this."""
        return {"seed": self.seed, "batch_size": self.batch_size, **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the seed of the interrupted run now, and its other state when training starts."""
        super().load_state_dict(state_dict)
        self.seed = state_dict["seed"]
        self._checkpoint_batch_size = state_dict.get("batch_size")

    def _first_batch(self) -> int:
        """Return the number of this epoch's batches to skip, from Lightning's loop; called when an epoch starts."""
        if self.trainer is None or not self.trainer.training:
            return 0
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        first: int = progress.current.ready
        if self._resumed_at is None:
            self._resumed_at = progress.total.ready
        if first and progress.total.ready != self._resumed_at:
            return 0  # the user iterates over the loader; only the Trainer's iteration skips batches
        is_mid_epoch = 0 < first < self.trainer.num_training_batches
        if is_mid_epoch and self._checkpoint_batch_size not in (None, self.batch_size):
            rank_zero_warn(
                f"the checkpoint was saved within an epoch with batch_size={self._checkpoint_batch_size}, but this run "
                f"has batch_size={self.batch_size}: the epoch continues after {first} mini-batches of the new size, so "
                "that some of its seeds are trained on twice or not at all"
            )
        self._checkpoint_batch_size = None
        self.restore_random_state()  # needed if training runs without Lightning's hooks
        self.set_order_state(first)
        return first

    def _training_epoch(self, number: int) -> int:
        """Return the epoch of an iteration over the training set: the Trainer's if it is training, else ``number``."""
        if self.trainer is not None and self.trainer.training:
            return self.trainer.current_epoch
        self._passes = number + 1
        return number

    def _order(self, stage: str, num_seeds: int, drop_last: bool, replicas: int, rank: int) -> DistributedSampler[int]:
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
            shuffle=training and self.shuffle,
            seed=self.seed % 2**62,
            drop_last=drop_last and training and replicas > 1,
        )

    @property
    def _running(self) -> bool:
        """Whether a Trainer is running with this DataModule, and so requests the loaders."""
        return self.trainer is not None and self.trainer.state.status == TrainerStatus.RUNNING

    @property
    def _replica(self) -> tuple[int, int]:
        """Number of replicas that seeds are sharded across, and this process's index, according to the strategy."""
        strategy = None if self.trainer is None else self.trainer.strategy
        kwargs = getattr(strategy, "distributed_sampler_kwargs", {})
        return kwargs.get("num_replicas", self._world_size), kwargs.get("rank", self._rank)


def _evaluation_epoch(number: int) -> int:
    return 0


def _training_keywords(owner: type, kind: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the training loader from the user's additional keywords."""
    kwargs = dict(kwargs)
    loader = kwargs.pop("loader", "neighbor")
    if loader not in ("neighbor", "link_neighbor", "custom"):
        raise ValueError(f"loader={loader!r} is not supported here; FullGraphDataModule trains on the full graph")
    options = _check_options(owner, kind, kwargs, keywords_of(owner))
    if options.get("shuffle") and ("sampler" in options or "batch_sampler" in options):
        raise ValueError("shuffle=True and a custom sampler exclude each other; omit shuffle")
    return options


def _evaluation_keywords(
    owner: type, kind: str, eval_loader_kwargs: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that evaluation loaders override, and those that their sampler overrides."""
    if not isinstance(eval_loader_kwargs, (Mapping, type(None))):
        raise TypeError(f"eval_loader_kwargs must be a dictionary, but is {eval_loader_kwargs!r}")
    given = dict(eval_loader_kwargs or {})
    overrides = {name: given.pop(name) for name in _SAMPLER_OPTIONS if name in given}
    try:
        if "seed" in given:
            raise ValueError("seed belongs to the DataModule, which derives a different stream for each loader")
        options = _check_options(owner, kind, given)
        if options.pop("shuffle", False):
            raise ValueError("shuffle=True is not supported: evaluation outputs are in the order of the seeds")
        for name in ("replace", "disjoint"):
            true_or_false(overrides.get(name, False), name)
    except (TypeError, ValueError) as error:
        raise type(error)(f"eval_loader_kwargs: {error}") from None
    return options, overrides


def _apply_overrides(sampler: BaseSampler, overrides: Mapping[str, Any]) -> BaseSampler:
    """Return the evaluation sampler: the same one, or (as in PyG) a copy with some attributes set."""
    if not overrides:
        return sampler
    other = copy.copy(sampler)
    for name, value in overrides.items():
        if not hasattr(sampler, name):
            raise ValueError(f"eval_loader_kwargs: {type(sampler).__name__} has no attribute {name}")
        setattr(other, name, value)
    if isinstance(other, NeighborSampler):
        other.check_options()
    return other


def _validate_sampler(sampler: BaseSampler, kind: str, given: Mapping[str, object]) -> None:
    """Validate a user's sampler, and warn about options that have no effect with it."""
    method = f"sample_from_{'nodes' if kind == 'node' else 'edges'}"
    if not callable(getattr(sampler, method, None)):
        raise TypeError(f"{kind}_sampler must be a PyG sampler with {method}, but is {sampler!r}")
    if given:
        rank_zero_warn(f"{', '.join(given)} has no effect: {kind}_sampler brings its own settings")


def _check_options(owner: type, kind: str, kwargs: Mapping[str, Any], also: Collection[str] = ()) -> dict[str, Any]:
    if reserved := sorted(_RESERVED & set(kwargs)):
        raise TypeError(f"unknown option {reserved[0]}: {owner.__name__} sets it for its loaders")
    if kwargs.get("generator") is not None:
        raise ValueError("generator is not supported: seed= determines the order, so that a run can be resumed")
    options = validate_options(kwargs, kind, {*keywords_of(_LOADERS[kind]), *also}, _RESERVED - {*also})
    options.pop("generator", None)
    if options.get("batch_sampler") is not None:
        for name in ("sampler", "drop_last"):
            if options.get(name):
                raise ValueError(f"batch_sampler and {name} exclude each other; omit {name}")
    return options

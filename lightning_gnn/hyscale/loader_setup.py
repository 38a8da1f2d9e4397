"""Loader setup for one rank of hybrid training: its shard of each mini-batch, its threads and its initial share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gnn.collective.prefetcher import CollectiveBatching
from lightning_gnn.distributed.mixed_device_group import MixedDeviceGroup
from lightning_gnn.hyscale.accelerator_sampling import (
    SAMPLES_ON_GPU,
    AcceleratorSampling,
    find_sampling,
)
from lightning_gnn.hyscale.admission import compare_trainers
from lightning_gnn.hyscale.analytic import measure_sampling_share, model_of
from lightning_gnn.hyscale.checks import check_training, find_conflict, overrides_transfer
from lightning_gnn.hyscale.costs import TaskMapping, Threads, split_seeds
from lightning_gnn.hyscale.drm import BalanceController, wanted_sampling
from lightning_gnn.hyscale.options import (
    ADMITTED,
    DETERMINISTIC_MODE_WARNING,
    NOMINAL_SEEDS,
    HyScaleOptions,
    PyGLoader,
    TrainerSet,
    allowed_drm,
    default_threads,
    is_adaptive,
    measurements_decide,
    replays,
    seeds_of_iteration,
)
from lightning_gnn.hyscale.plan import NodePlanner, collective_plan
from lightning_gnn.hyscale.sharded_loader import (
    ShardedBatchSampler,
    ShardedDataLoader,
    UnshardedDataLoader,
    find_collective_batching,
    find_stream_prefetching,
    is_shardable,
)
from lightning_gnn.hyscale.staged_prefetcher import BatchShare, PipelineSettings, StagedBatching
from lightning_gnn.hyscale.transfer import Transfer
from lightning_gnn.loading.batch import Batch
from lightning_gnn.loading.loaders import PipelineLoader, num_workers_of
from lightning_gnn.runtime.lightning import pl, rank_zero_warn


@dataclass(frozen=True)
class RankInfo:
    """Position of a rank among the trainers of all nodes."""

    trainers: TrainerSet
    global_rank: int
    local_rank: int
    num_nodes: int
    device: torch.device

    @property
    def trainer(self) -> int:
        """Index among the node's trainers, CPU trainers first."""
        return self.trainers.trainer_of_rank(self.local_rank)

    @property
    def node(self) -> int:
        """Index of the node."""
        return self.global_rank // len(self.trainers.devices)

    @property
    def is_single_rank(self) -> bool:
        """Whether this is the only rank."""
        return self.num_nodes * len(self.trainers.devices) == 1

    def node_slice(self, num_seeds: int) -> tuple[int, int]:
        """Return the start and stop of this node's equal slice of an iteration's seeds."""
        return num_seeds * self.node // self.num_nodes, num_seeds * (self.node + 1) // self.num_nodes


@dataclass(frozen=True)
class RankPlan:
    """What a rank contributes to the plan of its node."""

    mapping: TaskMapping | None  # the node's initial mapping; None except on its first rank
    state: dict[str, Any]  # of the checkpoint, as far as it still applies; only that of the first rank counts
    most_ahead: int  # mini-batches that the rank's own prefetching has in flight at most
    on_stream: bool  # whether its GPU prepares its mini-batches, without CPU threads
    profile: tuple[int, int] | None  # buffer size and measurements of collective batching, if it is to be planned


class HyScaleLoaders:
    """Converts the user's loaders to one rank's sharded loaders, and determines the initial shares."""

    def __init__(
        self,
        options: HyScaleOptions,
        info: RankInfo,
        group: MixedDeviceGroup | None,  # all ranks; None for a single rank
        dtype: torch.dtype | None,  # target dtype of floating-point attributes
        balance: BalanceController | None,  # of the previous fit; evaluation uses its shares
        restored: dict[str, Any],  # this strategy's state from a checkpoint; entries are removed once applied
    ) -> None:
        self.balance = balance
        self.loader: ShardedDataLoader | None = None
        """The training loader; None until training starts."""
        self.share = BatchShare(0, 1, 1)
        """This rank's share of the current mini-batch."""
        self._options = options
        self._info = info
        self._group = group
        self._dtype = dtype
        self._restored = restored
        self._sampling: AcceleratorSampling | None = None
        self._epoch_start = 0
        self._ahead = 0  # maximum number of mini-batches that this rank's stages have in flight

    def process(self, dataloader: object, module: pl.LightningModule, trains: bool) -> object:
        """Return a loader that yields this rank's shard of the mini-batches."""
        # Evaluation is sharded too; prediction runs on rank 0 only.
        info, is_single_rank = self._info, self._info.is_single_rank
        if trains:
            # A single trainer shards nothing; its loader is changed only if staged prefetching applies.
            is_planned = isinstance(getattr(dataloader, "prefetcher", None), CollectiveBatching)
            is_staged = info.trainers.num_accelerators and is_shardable(dataloader) and not is_planned
            if is_single_rank and not is_staged:
                if (conflict := find_conflict(dataloader)) is not None:
                    rank_zero_warn(f"a single trainer trains as without hyscale; several are refused: {conflict}")
                return dataloader
            check_training(dataloader, module)
            assert isinstance(dataloader, DataLoader)
            return self._make_training_loader(dataloader, module)
        if is_single_rank:
            return dataloader
        if not isinstance(dataloader, DataLoader) or not is_shardable(dataloader):
            return UnshardedDataLoader(dataloader, self._set_share, info.global_rank)
        if not module.trainer.predicting:
            batches = ShardedBatchSampler(dataloader, self._split_evaluation, info.global_rank, rank=info.global_rank)
            return ShardedDataLoader(dataloader, batches, self._set_share)
        if info.global_rank == 0:
            return dataloader
        no_seeds = ShardedBatchSampler(dataloader, lambda num_seeds, number: (0, 0), info.global_rank)
        return ShardedDataLoader(dataloader, no_seeds, self._set_share)

    # -- training

    def _make_training_loader(self, dataloader: DataLoader[Batch], module: pl.LightningModule) -> ShardedDataLoader:
        """Return the training loader, and start or continue load balancing."""
        options, info = self._options, self._info
        if self.loader is not None:
            self.loader.close()
        # Transfer to the device: in the pipeline, or by Lightning if the user overrides a transfer hook.
        has_own_hooks = overrides_transfer(module)
        if has_own_hooks and options.transfer_dtype is not None:
            rank_zero_warn(
                f"transfer_dtype={options.transfer_dtype!r} has no effect: the module or DataModule overrides a batch "
                "transfer hook"
            )
        transfer, on_accelerator = None, info.trainer >= info.trainers.num_cpu
        on_stream = find_stream_prefetching(dataloader) is not None
        collective = find_collective_batching(dataloader) if on_accelerator else None
        prepares_itself = on_stream or collective is not None
        if prepares_itself and options.transfer_dtype is not None:
            reason = SAMPLES_ON_GPU if on_stream else "collective batching copies mini-batches unchanged"
            rank_zero_warn(f"transfer_dtype={options.transfer_dtype!r} has no effect: {reason}")
        is_needed = not prepares_itself and (info.device.type != "cpu" or options.transfer_dtype is not None)
        if on_accelerator and not has_own_hooks and is_needed:
            transfer = Transfer(info.device, options.transfer_dtype)
        # Sampling: CPU trainers do not sample on accelerators.
        wanted = wanted_sampling(options.accelerator_sampling, allowed_drm(options.drm))
        present, self._sampling = self._sampling, None
        if collective is not None and wanted not in ("auto", 0.0):
            rank_zero_warn(f"accelerator_sampling={wanted} has no effect: the plan of collective batching decides that")
        elif isinstance(dataloader, PyGLoader) and on_accelerator and collective is None:
            self._sampling = find_sampling(wanted, dataloader, info.trainers, present, info.device)
        # Shares: unchanged if training continues with another loader of equally large mini-batches.
        start, stop = info.node_slice(seeds_of_iteration(dataloader))
        if self.balance is None or self.balance.mapping.total != (stop - start or NOMINAL_SEEDS):
            self.balance = self._make_controller(dataloader, module, wanted, stop - start, collective)
        balance = self.balance
        batches = self._make_batch_sampler(dataloader, module.trainer)
        threads = balance.rank_threads(info.trainer)
        if on_stream:
            self.loader = ShardedDataLoader(dataloader, batches, self._set_share, on_stream=True)
        elif collective is not None:
            collective.manage(balance.ahead, options.stall_timeout)
            if balance.current.buffers is not None and collective.plan is None:  # restored, or planned earlier
                collective.adopt(collective_plan(balance.current.buffers, balance.stage_times))
            self.loader = ShardedDataLoader(dataloader, batches, self._set_share, collective=collective)
            self.loader.resize(threads[:2])
        elif isinstance(dataloader, PipelineLoader):
            settings = PipelineSettings(options.prefetch, threads[:2], self._ahead, options.stall_timeout, self._dtype)
            staged = StagedBatching(
                batches, settings, transfer, self._sampling, lambda: balance.current.sampled_fraction(info.trainer),
                is_left_out=lambda: not on_accelerator and balance.leaves_out_cpu,
            )  # fmt: skip
            self.loader = ShardedDataLoader(dataloader, batches, self._set_share, staged, dtype=self._dtype)
        else:
            transfer = transfer if options.prefetch else None
            self.loader = ShardedDataLoader(dataloader, batches, self._set_share, transfer=transfer, dtype=self._dtype)
        return self.loader

    def _make_batch_sampler(self, dataloader: DataLoader[Batch], trainer: pl.Trainer) -> ShardedBatchSampler:
        """Return this rank's shards of the training mini-batches, starting at the next one to train on."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        skip_batches = dataloader.first_batch if isinstance(dataloader, PipelineLoader) else None
        # A single trainer starts like a plain Trainer.
        skip_trained = (lambda: 0) if self._info.is_single_rank else (lambda: progress.current.ready)
        batches = ShardedBatchSampler(
            dataloader,
            self._split_training,
            self._info.global_rank,
            first_batch=skip_batches or skip_trained,
            num_batches=lambda: trainer.num_training_batches,
            on_epoch=self._begin_epoch,
            rank=None if self._info.is_single_rank else self._info.global_rank,
        )
        if skip_batches is None:  # otherwise the DataModule restores the order
            batches.resumed = self._restored.pop("order", None)
        return batches

    def _split_training(self, num_seeds: int, number: int) -> tuple[int, int]:
        """Return the start and stop of this rank's seeds in a training iteration."""
        assert self.balance is not None
        start, stop = self._info.node_slice(num_seeds)
        first, last = self.balance.split(stop - start, self._epoch_start + number)[self._info.trainer]
        return start + first, start + last

    def _begin_epoch(self, first: int) -> None:
        """Align the iteration count with ``first``, the first mini-batch of the epoch to train on."""
        assert self.balance is not None
        self._epoch_start = self.balance.iteration - first

    def _set_share(self, share: BatchShare) -> None:
        """Set this rank's share of the next mini-batch."""
        self.share = share

    def begin_iteration(self) -> None:
        """Apply the decisions that take effect in the next iteration."""
        assert self.balance is not None
        before = self.balance.current
        self.balance.begin()
        after = self.balance.current
        collective = None if self.loader is None else self.loader.collective
        if collective is not None and after.buffers is not None and after.buffers != before.buffers:
            collective.adopt(collective_plan(after.buffers, self.balance.stage_times))
        if before != after:
            self.resize()

    def resize(self) -> None:
        """Apply this rank's current thread counts to the pipeline and to torch."""
        if self.balance is None or self.loader is None or self._info.is_single_rank:
            return
        sampling, loading, training = self.balance.rank_threads(self._info.trainer)
        self.loader.resize((sampling, loading))
        if torch.get_num_threads() != training:
            torch.set_num_threads(training)

    @property
    def resumed_rng(self) -> Tensor | None:
        """The RNG state with which hooks continue in a resumed epoch, or None if its order used no random numbers."""
        resumed = None if self.loader is None else self.loader.batches.resumed
        return None if resumed is None else resumed[1]

    def order_state(self) -> tuple[Tensor, Tensor] | None:
        """Return the RNG states before the epoch's shuffle and now; None if the order uses no random numbers."""
        state = None if self.loader is None else self.loader.batches.order_state
        return None if state is None else (state, torch.get_rng_state())

    def close(self) -> None:
        """Stop all pipeline threads; warn about threads that cannot be stopped."""
        hanging = [] if self.loader is None else self.loader.close()
        if hanging:
            rank_zero_warn(f"hyscale could not stop {hanging}: they hang in a call that Python cannot interrupt")

    # -- evaluation

    def _split_evaluation(self, num_seeds: int, number: int) -> tuple[int, int]:
        """Return the start and stop of this rank's seeds in an evaluation mini-batch."""
        start, stop = self._info.node_slice(num_seeds)
        first, last = split_seeds(stop - start, self._get_evaluation_shares())[self._info.trainer]
        return start + first, start + last

    def _get_evaluation_shares(self) -> Sequence[float]:
        """Return the evaluation shares of this node's trainers: those of training, otherwise a safe default."""
        options, trainers = self._options, self._info.trainers
        if self.balance is not None:
            return self.balance.current.seeds
        if options.shares is not None:
            return options.shares
        if options.cpu_share == "auto" and trainers.num_accelerators:
            return [0.0] * trainers.num_cpu + [1.0] * trainers.num_accelerators
        return trainers.weights(options.cpu_share)

    # -- initial mapping

    def _make_controller(
        self,
        dataloader: DataLoader[Batch],
        module: pl.LightningModule,
        wanted: str | float,
        total: int,
        collective: CollectiveBatching | None,  # prepares this rank's mini-batches
    ) -> BalanceController:
        """Return a controller with the user's mapping, else the checkpoint's, else the measured one if allowed."""
        options, info = self._options, self._info
        drm = False if info.is_single_rank else allowed_drm(options.drm)  # a single rank has nothing to balance
        if is_adaptive(drm) and not total:
            rank_zero_warn(
                f"hyscale: drm={drm!r} needs mini-batches of a known size with seeds for every node; it is disabled"
            )
            drm = False
        # The first rank of the node decides for all ranks of the node.
        num_workers = num_workers_of(dataloader) * (1 if collective is None else info.trainers.num_accelerators)
        shared = drm is not False or info.trainers.num_accelerators > 0  # feeding accelerators takes cores, too
        threads = options.first_threads(default_threads(num_workers, info.trainers, shared))
        state = self._restored.pop("balance", {}).get(str(info.node), {})
        mapping = None
        if info.local_rank == 0:
            mapping, state = self._choose_initial_mapping(dataloader, module, wanted, total, threads, state)
        own = self._plan_rank(dataloader, num_workers, sum(threads[:2]), collective, mapping, state)
        ranks = [own] if self._group is None else self._group.all_gather_objects(own)
        first = info.global_rank - info.local_rank
        mapping, state = ranks[first].mapping, ranks[first].state
        assert mapping is not None
        self._warn_of_deterministic_mode()
        # Upper bound of the mini-batches in flight: a decision takes effect after all of these.
        workers = num_workers * (getattr(dataloader, "prefetch_factor", None) or 2)
        staged = 2 * (options.prefetch + 1) + (mapping.accelerator_sampling > 0)
        self._ahead = max(staged, sum(mapping.threads), 0 if isinstance(dataloader, PipelineLoader) else workers + 3)
        ahead = max(self._ahead, *(rank.most_ahead for rank in ranks))
        # Accelerators are equal, so all ranks plan for the first one that profiles.
        trainers = [ranks[first + info.trainers.rank_of_trainer(i)] for i in range(len(info.trainers.devices))]
        profile = next((rank.profile for rank in trainers if rank.profile is not None), None)
        planner = None if profile is None or replays(drm) else NodePlanner(*profile, ahead)
        balance = BalanceController(
            info.trainers, mapping, drm, options.decision_log, ahead, is_logging_rank=info.local_rank == 0,
            on_stream=[rank.on_stream for rank in trainers], planner=planner,
        )  # fmt: skip
        balance.load_state_dict(state)
        if balance.current.buffers is not None:
            balance.planner = None
        return balance

    def _plan_rank(
        self,
        dataloader: DataLoader[Batch],
        num_workers: int,
        num_threads: int,  # of the node for sampling and feature loading
        collective: CollectiveBatching | None,
        mapping: TaskMapping | None,
        state: dict[str, Any],
    ) -> RankPlan:
        """Return what this rank contributes to the plan of its node."""
        prefetching = find_stream_prefetching(dataloader)
        most_ahead, profile = 0 if prefetching is None else prefetching.most_ahead, None
        if collective is not None:
            most_ahead = collective.needed_ahead(num_threads // self._info.trainers.num_accelerators)
            if num_workers and collective.plan is None and measurements_decide():
                profile = collective.gpu_buffer_size, collective.profiler.num_measurements
        on_stream = prefetching is not None or (collective is not None and not num_workers)
        return RankPlan(mapping, state, most_ahead, on_stream, profile)

    def _warn_of_deterministic_mode(self) -> None:
        """Warn in the first fit if choices depend on measurements that ``deterministic=True`` excludes."""
        options, trainers = self._options, self._info.trainers
        is_hybrid = min(trainers.num_accelerators, trainers.num_cpu) > 0
        needs_measuring = is_adaptive(options.drm) or (options.automatic and is_hybrid)
        if options.accelerator_sampling == "auto":
            needs_measuring |= any(device.type != "cpu" for device in trainers.devices)
        is_first_fit = self.balance is None and not self._info.is_single_rank
        if needs_measuring and is_first_fit and not replays(options.drm) and not measurements_decide():
            rank_zero_warn(DETERMINISTIC_MODE_WARNING)

    def _choose_initial_mapping(
        self,
        dataloader: DataLoader[Batch],
        module: pl.LightningModule,
        wanted: str | float,
        total: int,
        threads: Threads,
        state: dict[str, Any],
    ) -> tuple[TaskMapping, dict[str, Any]]:
        """Return the initial mapping and the still applicable checkpoint state."""
        # Only the first rank of the node measures: concurrent measurements would disturb each other.
        options, trainers, sampling = self._options, self._info.trainers, self._sampling
        mapping = options.first_mapping(trainers, total, threads)
        modeled: float | None = None
        # A resumed run reuses its initial mapping.
        saved = None
        if options.automatic or (wanted == "auto" and sampling is not None):
            saved, state = _restore_mapping(state, mapping)
        if saved is not None:
            modeled = saved.accelerator_sampling or None  # 0: no accelerator could sample then, but one can now
            if options.automatic:
                is_same = sum(saved.threads) == sum(threads)  # otherwise machine or loader changed
                mapping = replace(saved, threads=options.first_threads(saved.threads if is_same else threads))
        # Otherwise the performance model finds the best mapping with the same number of threads, if allowed to measure.
        elif total and options.models_shares(trainers):
            dtype = None if overrides_transfer(module) else options.transfer_dtype
            model = model_of(trainers, dataloader, module, total, sampling, dtype)
            if model is not None:
                best = model.best_mapping(trainers.num_cpu, max(sum(threads), 2 + trainers.num_cpu))
                modeled = best.accelerator_sampling
                mapping = replace(best, threads=options.first_threads(best.threads))
                # The process that has started the others, if it is this package's launcher, has decided.
                if options.admits_cpu_trainers(trainers) and ADMITTED not in os.environ:
                    admission = compare_trainers(model, trainers, options, num_workers_of(dataloader))
                    if not admission.cpu_trainers:
                        rank_zero_warn(f"{admission}; their processes were started by others, so drm=True tries them")
        share = modeled if isinstance(wanted, str) else wanted
        if sampling is None:
            share = 0.0
        elif share is None:
            count = trainers.num_accelerators
            share = measure_sampling_share(sampling, dataloader, max(1, total), mapping.threads[0], count)
        return replace(mapping, accelerator_sampling=share), state


def _restore_mapping(state: dict[str, Any], expected: TaskMapping) -> tuple[TaskMapping | None, dict[str, Any]]:
    """Return a checkpoint's initial mapping, None if missing or not applicable, and the still applicable state."""
    if "first" not in state:
        return None, state
    try:
        saved = TaskMapping.from_dict(state["first"])
        saved.check_same_trainers(expected)
    except ValueError as error:
        rank_zero_warn(f"hyscale rebalances: the saved mapping does not fit ({error})")
        return None, {}
    return saved, state

"""The loaders of hybrid training, set up for one rank: its part of each mini-batch, its threads, its first share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gnn.distributed.mixed_device_group import MixedDeviceGroup
from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling
from lightning_gnn.hyscale.checks import check_training, overrides_transfer
from lightning_gnn.hyscale.options import (
    TURNED_OFF,
    HyScaleOptions,
    TrainerSet,
    allowed_drm,
    balances,
    default_threads,
    measurements_decide,
    replays,
    seeds_of_iteration,
)
from lightning_gnn.hyscale.performance_model.calibrate import (
    find_sampling,
    first_share,
    model_of,
    resumed_mapping,
    wanted_sampling,
)
from lightning_gnn.hyscale.resource_manager.controller import BalanceController
from lightning_gnn.hyscale.sharded_loader import (
    ShardedBatchSampler,
    ShardedDataLoader,
    UnshardedDataLoader,
    can_be_cut,
    split_seeds,
)
from lightning_gnn.hyscale.staged_prefetcher import BatchShare, PipelineSettings, StagedBatching
from lightning_gnn.hyscale.transfer import Transfer
from lightning_gnn.loading.batch import Batch
from lightning_gnn.loading.loaders import NodeLoader, PipelineLoader, num_workers_of


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is among the trainers of all nodes."""

    trainers: TrainerSet
    global_rank: int
    local_rank: int
    num_nodes: int
    device: torch.device

    @property
    def trainer(self) -> int:
        """Which of the node's trainers it is, CPU trainers first."""
        return self.trainers.of_rank(self.local_rank)

    @property
    def node(self) -> int:
        """The number of the node."""
        return self.global_rank // len(self.trainers.devices)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.num_nodes * len(self.trainers.devices) == 1

    def node_slice(self, num_seeds: int) -> tuple[int, int]:
        """Return the node's equal part of an iteration's seeds: the first, and the one after the last."""
        return num_seeds * self.node // self.num_nodes, num_seeds * (self.node + 1) // self.num_nodes


class HyScaleLoaders:
    """Turns the user's loaders into those of one rank, and decides what share of the work training begins with."""

    def __init__(
        self,
        options: HyScaleOptions,
        place: RankPlace,
        group: MixedDeviceGroup | None,  # all ranks; None where there is one alone
        dtype: torch.dtype | None,  # what floating attributes are converted to
        balance: BalanceController | None,  # of the run before, whose shares evaluation takes
        restored: dict[str, Any],
    ) -> None:
        self.balance = balance
        self.loader: ShardedDataLoader | None = None
        """The training loader, once there is one."""
        self.share = BatchShare(0, 1, 1)
        """This rank's share of the mini-batch that came last."""
        self._options = options
        self._place = place
        self._group = group
        self._dtype = dtype
        self._restored = restored
        self._sampling: AcceleratorSampling | None = None
        self._epoch_start = 0

    def process(self, dataloader: object, module: pl.LightningModule, trains: bool) -> object:
        """Return a loader of this rank's part of the mini-batches."""
        # Evaluation is shared out too, and prediction done by rank 0.
        place, alone = self._place, self._place.is_alone
        if trains:
            # A lone trainer shares nothing; what cannot be prefetched in stages either is left as it is.
            if alone and (not place.trainers.num_accelerators or not can_be_cut(dataloader)):
                return dataloader
            check_training(dataloader, module)
            assert isinstance(dataloader, DataLoader)
            return self._training_loader(dataloader, module)
        if alone:
            return dataloader
        if not isinstance(dataloader, DataLoader) or not can_be_cut(dataloader):
            return UnshardedDataLoader(dataloader, self._set_share, place.global_rank)
        if not module.trainer.predicting:
            batches = ShardedBatchSampler(dataloader, self._split_evaluation, place.global_rank, rank=place.global_rank)
            return ShardedDataLoader(dataloader, batches, self._set_share)
        if place.global_rank == 0:
            return dataloader
        nothing = ShardedBatchSampler(dataloader, lambda num_seeds, number: (0, 0), place.global_rank)
        return ShardedDataLoader(dataloader, nothing, self._set_share)

    # -- training

    def _training_loader(self, dataloader: DataLoader[Batch], module: pl.LightningModule) -> ShardedDataLoader:
        """Return the loader of training; with it, the balance begins or goes on."""
        options, place = self._options, self._place
        if self.loader is not None:
            self.loader.close()
        # Who brings mini-batches to the device: the pipeline, or Lightning where the user has hooks around that.
        own_hooks = overrides_transfer(module)
        if own_hooks and options.transfer_dtype is not None:
            rank_zero_warn(
                f"transfer_dtype={options.transfer_dtype!r} changes nothing: the module or DataModule overrides a hook "
                "of the transfer of batches"
            )
        transfer, accelerated = None, place.trainer >= place.trainers.num_cpu
        if accelerated and not own_hooks and (place.device.type != "cpu" or options.transfer_dtype is not None):
            transfer = Transfer(place.device, options.transfer_dtype)
        # Who samples: a CPU trainer leaves accelerators alone.
        wanted = wanted_sampling(options.accelerator_sampling, allowed_drm(options.drm))
        present, self._sampling = self._sampling, None
        if isinstance(dataloader, NodeLoader) and accelerated:
            self._sampling = find_sampling(wanted, dataloader, place.trainers, present, place.device)
        # Who gets how much, unless training goes on with another loader of the same mini-batches.
        start, stop = place.node_slice(seeds_of_iteration(dataloader))
        if self.balance is None or self.balance.total != stop - start:
            self.balance = self._begin_balance(dataloader, module, wanted, stop - start)
        batches = self._training_batches(dataloader, module.trainer)
        threads = self.balance.rank_threads(place.trainer)
        if isinstance(dataloader, PipelineLoader):
            settings = PipelineSettings(
                options.prefetch, threads[:2], self.balance.ahead, options.stall_timeout, self._dtype
            )
            staged = StagedBatching(batches, settings, transfer, self._sampling, self._sampled_here)
            self.loader = ShardedDataLoader(dataloader, batches, self._set_share, staged, dtype=self._dtype)
        else:
            transfer = transfer if options.prefetch else None
            self.loader = ShardedDataLoader(dataloader, batches, self._set_share, transfer=transfer, dtype=self._dtype)
        return self.loader

    def _training_batches(self, dataloader: DataLoader[Batch], trainer: pl.Trainer) -> ShardedBatchSampler:
        """Return this rank's slices of the training mini-batches, from the one on that is trained on next."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        own = dataloader.first_batch if isinstance(dataloader, PipelineLoader) else None
        # A lone trainer begins as a plain Trainer does.
        counted = (lambda: 0) if self._place.is_alone else (lambda: progress.current.ready)
        batches = ShardedBatchSampler(
            dataloader,
            self._split_training,
            self._place.global_rank,
            first_batch=own or counted,
            num_batches=lambda: trainer.num_training_batches,
            on_epoch=self._begin_epoch,
            rank=None if self._place.is_alone else self._place.global_rank,
        )
        if own is None:  # else the DataModule sees to it
            batches.resumed = self._restored.pop("order", None)
        return batches

    def _split_training(self, num_seeds: int, number: int) -> tuple[int, int]:
        """Return this rank's part of a training iteration's seeds."""
        assert self.balance is not None
        start, stop = self._place.node_slice(num_seeds)
        first, last = self.balance.split(stop - start, self._epoch_start + number)[self._place.trainer]
        return start + first, start + last

    def _begin_epoch(self, first: int) -> None:
        """Count iterations from an epoch's first mini-batch that is trained on."""
        assert self.balance is not None
        self._epoch_start = self.balance.iteration - first

    def _sampled_here(self) -> float:
        """Return the part of this rank's sampling that its accelerator does."""
        assert self.balance is not None
        return self.balance.sampled_by(self._place.trainer)

    def _set_share(self, share: BatchShare) -> None:
        """Take this rank's share of the mini-batch that comes next."""
        self.share = share

    def resize(self) -> None:
        """Take the threads that this rank has now."""
        if self.balance is None or self.loader is None or self._place.is_alone:
            return
        sampling, loading, training = self.balance.rank_threads(self._place.trainer)
        self.loader.resize((sampling, loading))
        if torch.get_num_threads() != training:
            torch.set_num_threads(training)

    @property
    def resumed_rng(self) -> Tensor | None:
        """The state with which hooks go on drawing, if the order of a resumed epoch was drawn before it."""
        resumed = None if self.loader is None else self.loader.batches.resumed
        return None if resumed is None else resumed[1]

    def order_state(self) -> tuple[Tensor, Tensor] | None:
        """Return from which state the epoch's order was drawn, and with which hooks go on; None if nothing draws it."""
        state = None if self.loader is None else self.loader.batches.order_state
        return None if state is None else (state, torch.get_rng_state())

    def close(self) -> None:
        """End all threads of the pipeline."""
        hanging = [] if self.loader is None else self.loader.close()
        if hanging:
            rank_zero_warn(f"hyscale could not end {hanging}: they hang in a call that Python cannot interrupt")

    # -- evaluation

    def _split_evaluation(self, num_seeds: int, number: int) -> tuple[int, int]:
        """Return this rank's part of the seeds of an evaluation's mini-batch."""
        start, stop = self._place.node_slice(num_seeds)
        first, last = split_seeds(stop - start, self._evaluation_shares())[self._place.trainer]
        return start + first, start + last

    def _evaluation_shares(self) -> Sequence[float]:
        """Return the shares of this node's trainers in evaluation: those of training, or else a safe guess."""
        options, trainers = self._options, self._place.trainers
        if self.balance is not None:
            return self.balance.shares
        if options.shares is not None:
            return options.shares
        if options.cpu_share == "auto" and trainers.num_accelerators:
            return [0.0] * trainers.num_cpu + [1.0] * trainers.num_accelerators
        return trainers.weights(options.cpu_share)

    # -- what training begins with

    def _begin_balance(
        self, dataloader: DataLoader[Batch], module: pl.LightningModule, wanted: str | float, total: int
    ) -> BalanceController:
        """Share the work out: as the user says, else as a checkpoint does, else by measurements, where these decide."""
        options, place = self._options, self._place
        drm = allowed_drm(options.drm)
        if place.is_alone:
            drm = False  # there is no one to share with
        if balances(drm) and not total:
            rank_zero_warn(
                f"hyscale: drm={drm!r} needs mini-batches of a known size, with seeds for every node; it is off"
            )
            drm = False
        num_workers = num_workers_of(dataloader)
        shared = drm is not False or place.trainers.num_accelerators > 0  # what feeds accelerators needs cores, too
        threads = options.first_threads(default_threads(num_workers, place.trainers, shared))
        automatic = not replays(drm) and options.automatic
        # The state of this node in a checkpoint; those of older versions are lists.
        states = self._restored.pop("balance", None)
        state = states.get(str(place.node), {}) if isinstance(states, dict) else {}
        # One rank of the node decides, and the others do as it does.
        found = None
        if place.local_rank == 0:
            found = self._initial_mapping(dataloader, module, wanted, total, threads, automatic, state)
        if self._group is not None:
            found = self._group.all_gather_objects(found)[place.global_rank - place.local_rank]
        assert found is not None
        weights, threads, on_accelerator, state = found
        trainers = place.trainers
        asked = balances(options.drm) or (automatic and trainers.num_accelerators > 0 and trainers.num_cpu > 0)
        asked |= options.accelerator_sampling == "auto" and any(device.type != "cpu" for device in trainers.devices)
        if (
            asked
            and not replays(options.drm)
            and not measurements_decide()
            and self.balance is None
            and not place.is_alone
        ):
            rank_zero_warn(TURNED_OFF)
        # How many mini-batches may be under way: decisions come into force behind these.
        workers = num_workers * (getattr(dataloader, "prefetch_factor", None) or 2)
        staged = 2 * (options.prefetch + 1) + (on_accelerator > 0)
        ahead = max(staged, sum(threads), 0 if isinstance(dataloader, PipelineLoader) else workers + 3)
        balance = BalanceController(
            place.trainers, weights, threads, total, drm, options.decision_log, ahead, on_accelerator,
            is_logging_rank=place.local_rank == 0,
        )  # fmt: skip
        balance.load_state_dict(state)
        return balance

    def _initial_mapping(
        self,
        dataloader: DataLoader[Batch],
        module: pl.LightningModule,
        wanted: str | float,
        total: int,
        threads: tuple[int, int, int],
        automatic: bool,
        state: dict[str, Any],
    ) -> tuple[list[float], tuple[int, int, int], float, dict[str, Any]]:
        """Return the first shares, threads, part of the sampling on accelerators, and what of the state still fits."""
        # The first rank of the node measures alone: at the same time, ranks would disturb each other.
        options, trainers, sampling = self._options, self._place.trainers, self._sampling
        weights: list[float] | None = None
        modeled: float | None = None
        # A resumed run goes on with what it began with.
        before = None
        if automatic or (wanted == "auto" and sampling is not None):
            before, state = resumed_mapping(state, trainers, total)
        if before is not None:
            modeled = before.accelerator_sampling or None  # 0: nothing could sample there, and now it can
            if automatic:
                weights, threads = list(before.shares), options.first_threads(before.threads_of(threads))
        # Else the performance model finds the best mapping of threads that are as many, where measurements decide.
        mixed = trainers.num_cpu > 0 and trainers.num_accelerators > 0 and total > 0
        if weights is None and automatic and mixed and measurements_decide():
            dtype = None if overrides_transfer(module) else options.transfer_dtype
            model = model_of(trainers, dataloader, module, total, sampling, dtype)
            if model is not None:
                best = model.best_mapping(trainers.num_cpu, max(sum(threads), 2 + trainers.num_cpu))
                modeled = best.accelerator_sampling
                weights, threads = list(best.shares), options.first_threads(best.threads)
        if weights is None:
            weights = options.first_weights(trainers)
        if sampling is None:
            there = 0.0
        elif not isinstance(wanted, str):
            there = wanted
        elif modeled is not None:
            there = modeled
        else:
            there = first_share(sampling, dataloader, max(1, total), threads[0], trainers.num_accelerators)
        return weights, threads, there, state

"""Hybrid training: CPUs and accelerators train one model together, a process for each (HyScale-GNN)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import Unpack, override

from lightning_gnn.datamodules.base import MiniBatchDataModule
from lightning_gnn.distributed.exceptions import is_handling_exception
from lightning_gnn.distributed.monitored_ranks import RankOptions
from lightning_gnn.distributed.step_sync import BatchWeight, StepSummary
from lightning_gnn.distributed.weighted_ddp import WeightedDDPStrategy
from lightning_gnn.hyscale.checks import check_precision
from lightning_gnn.hyscale.loader_setup import HyScaleLoaders, RankPlace
from lightning_gnn.hyscale.options import (
    HyScaleOptions,
    TrainerSet,
    trainers_of,
)
from lightning_gnn.hyscale.resource_manager.controller import BalanceController, StageClock, stage_row
from lightning_gnn.hyscale.rng_streams import RankRNG
from lightning_gnn.hyscale.sharded_loader import ShardedDataLoader
from lightning_gnn.runtime.checkpoint_io import SafeCheckpointIO
from lightning_gnn.runtime.precision import convert_batches, input_dtype

log = logging.getLogger(__name__)


class HyScaleStrategy(WeightedDDPStrategy):
    """Synchronous SGD of CPU trainers and accelerators (HyScale-GNN, sections III and V), each a process of its own.

    The seeds of each mini-batch of the user's loader are shared out: every rank makes and trains on a mini-batch of its
    part, on the whole LightningModule. The first ranks are the accelerators, the last the CPU trainers. Losses weigh as
    much as their shares, so that the gradient is exactly the weighted sum over the ranks' mini-batches. For losses that
    are means over seeds it equals that of the undivided mini-batch where a seed's result does not depend on the other
    seeds: with all neighbors, and without batch statistics or degrees inside the mini-batch (``GCNConv``).

    For a loss that is no mean over seeds, ``training_step`` returns ``{"loss": loss, "weight": weight}``: what the loss
    was divided by (the number of labels that count, or the sum of their class weights), or ``"sum"`` where it was not
    divided. Without, losses of ``torch.nn.functional`` that need it are warned about in the first mini-batches. Manual
    optimization weighs by seeds, and must call ``self.manual_backward``.

    What ranks write to buffers in a step is made one again, and what ``self.log`` is given in the steps becomes a mean
    weighted by its ``batch_size`` or else by seeds. Steps draw random numbers from a stream of the rank's own, hooks
    from one that all ranks share. Validation and testing are shared out too; prediction is done by rank 0, whose
    results all ranks return. A rank without seeds runs its step on one seed, and leaves no trace of it. Modules whose
    parameters have no size yet (``in_channels=-1``) are refused.

    A lone trainer is the plain Trainer with prefetching. With ``Trainer(deterministic=True)`` no measurement decides:
    equal shares, default threads, no balancing. With several nodes, start a process for each trainer on each (torchrun,
    SLURM); ``batch_size`` counts the seeds of all.

    Args:
        cpu_trainers: CPU trainers per node; ``Trainer(accelerator="cpu", devices=4)`` means four, too.
        cpu_share: Part of the seeds for the CPU trainers, in (0, 1], or ``"auto"``: what the performance model finds
            best by short measurements, or what a checkpoint says. ``drm`` may change it.
        drm: Balance the work while it runs; ``"paper"``: by algorithm 1 to the letter; or the path of a recorded log of
            decisions to replay. With ``False`` or a replay, a resumed run continues bit for bit on this package's
            loaders.
        prefetch: 2: two-stage prefetching; 1: feature loading and data transfer as one stage; 0: none.
        stall_timeout: Seconds after which a rank that gives no sign of life, a step that does not end, or a stage that
            makes no progress ends the run; the stages of ``prefetch=0`` are not watched.
        transfer_dtype: Features travel to accelerators as ``"float16"`` or row-quantized ``"int8"``; None: as they are.
        shares: Part of the seeds of every trainer, CPU trainers first; wins over ``cpu_share``.
        threads: CPU threads of sampling, feature loading and CPU trainers of a node; by default from the loader's
            ``num_workers`` and the cores. Each rank gets its share of the first two, at least one.
        devices: The accelerators; by default the Trainer's. ``["cpu"]`` lets the CPU stand for one.
        decision_log: Where to record the decisions, one JSON line each, for a replay by ``drm``.
        accelerator_sampling: Part of the sampling that accelerators do to begin with, in [0, 1], or ``"auto"``: as
            measured, where they can (CUDA, this package's loaders). ``drm`` may change it, and a replay's wins. The
            mini-batches do not depend on it.
        agree_every: Iterations after which parameters and states of optimizers become those of rank 0 again: unlike
            devices round differently. By how much they had parted is :attr:`drift`.
        process_group_backend: By default gloo where CPUs train, else what suits the devices.
        **kwargs: Of Lightning's ``DDPStrategy``: ``checkpoint_io`` (by default one that a crash cannot damage),
            ``start_method`` (not ``"fork"``), and such.

    Raises:
        TypeError, ValueError: An option is unknown, or out of range.

    Examples:
        On a machine with a GPU, ``Trainer(strategy="hyscale")`` trains on it and on the CPU. Here the CPU trains alone:

        >>> import torch, pytorch_lightning as pl
        >>> from torch_geometric.data import Data
        >>> from torch_geometric.nn import GraphSAGE
        >>> from lightning_gnn import HyScaleStrategy, NeighborDataModule
        >>> class Classifier(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.model = GraphSAGE(4, 8, num_layers=2, out_channels=3)
        ...     def training_step(self, batch, batch_idx):
        ...         scores = self.model(batch.x, batch.edge_index)[: batch.batch_size]
        ...         return torch.nn.functional.cross_entropy(scores, batch.y[: batch.batch_size])
        ...     def configure_optimizers(self):
        ...         return torch.optim.Adam(self.parameters())
        >>> graph = Data(x=torch.rand(32, 4), edge_index=torch.randint(32, (2, 128)), y=torch.randint(3, (32,)))
        >>> data = NeighborDataModule(graph, torch.arange(32), num_neighbors=[3, 3], batch_size=8)
        >>> trainer = pl.Trainer(max_epochs=1, accelerator="cpu", strategy=HyScaleStrategy(),
        ...     logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        >>> trainer.fit(Classifier(), data)
        >>> trainer.global_step, trainer.strategy.trainers.names
        (4, ['0 (CPU)'])
    """

    strategy_name = "hyscale"
    synced_attributes = ("balance", "drift")

    def __init__(
        self,
        cpu_trainers: int = 1,
        cpu_share: str | float = "auto",
        drm: bool | str | Path = True,
        prefetch: int = 2,
        stall_timeout: float = 300.0,
        transfer_dtype: str | None = None,
        *,
        shares: Sequence[float] | None = None,
        threads: Sequence[int] | None = None,
        devices: Sequence[str | torch.device] | None = None,
        decision_log: str | Path | None = None,
        accelerator_sampling: str | float = "auto",
        agree_every: int = 100,
        process_group_backend: str | None = None,
        **kwargs: Unpack[RankOptions],
    ) -> None:
        self.options = HyScaleOptions(
            cpu_trainers, cpu_share, drm, prefetch, stall_timeout, transfer_dtype, shares, threads, devices,
            decision_log, accelerator_sampling, agree_every,
        )  # fmt: skip
        self.trainers = TrainerSet((), 0)
        """Who trains on this node, once it is known."""
        self.balance: BalanceController | None = None
        """Who gets how much of the work, and the times of the last iterations, once training has begun."""
        self.loader: ShardedDataLoader | None = None
        """The training loader with its pipeline, once there is one."""
        self.drift = 0.0
        """The largest difference, relative to a tensor's largest number, by which a rank's differed from rank 0's."""
        self._loaders: HyScaleLoaders | None = None
        self._rng: RankRNG | None = None
        self._clock: StageClock | None = None
        self._is_observed = False
        self._own_threads = torch.get_num_threads()
        self._restored: dict[str, Any] = {}
        if kwargs.get("checkpoint_io") is None:
            kwargs["checkpoint_io"] = SafeCheckpointIO()
        timeout = timedelta(seconds=max(1800.0, self.options.stall_timeout))
        super().__init__(timeout, process_group_backend, **kwargs)

    # -- ranks

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this node's ranks."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        """Add the CPU trainers to what the Trainer has found."""
        if devices is not None:
            self.trainers = trainers_of(self.options.cpu_trainers, self.options.accelerators(devices), devices)
            order = range(len(self.trainers.devices))
            devices = [self.trainers.devices[self.trainers.of_rank(rank)] for rank in order]
        self._parallel_devices = devices

    @property
    @override
    def rank_name(self) -> str:
        return f"trainer {self.trainers.names[self.trainers.of_rank(self.local_rank)]}"

    @override
    def _configure_launcher(self) -> None:
        processes = self.num_nodes * self.num_processes
        if self.world_size != processes:  # Lightning's own message does not mention cpu_trainers
            raise ValueError(
                f"hyscale has a process for each trainer, {self.num_processes} per node "
                f"({', '.join(self.trainers.names)}), together {processes}, but {self.world_size} were started; start "
                f"as many on each node, as with torchrun --nproc-per-node={self.num_processes}, or set cpu_trainers or "
                "Trainer(devices=...)"
            )
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        """Check the options against the devices, find the other ranks, and prepare to share out loaders."""
        options, trainers = self.options, self.trainers
        if options.shares is not None and len(options.shares) != len(trainers.devices):
            raise ValueError(
                f"shares has {len(options.shares)} entries, but there are {len(trainers.devices)} trainers (CPU "
                "trainers first)"
            )
        if options.cpu_share != "auto" and not (trainers.num_cpu and trainers.num_accelerators):
            rank_zero_warn(f"cpu_share={options.cpu_share} changes nothing: there are only {trainers.names}")
        if self._layer_sync is not None and trainers.num_cpu:
            rank_zero_warn("sync_batchnorm=True changes nothing: hyscale's trainers normalize their own mini-batches")
            self._layer_sync = None
        # One order for all; a random one is drawn by rank 0, as a plain Trainer would draw it.
        self._module.trainer._accelerator_connector.use_distributed_sampler = False
        check_precision(self.precision_plugin, trainers)
        if self.root_device.type == "cpu" and not isinstance(self.accelerator, CPUAccelerator):
            self.accelerator = CPUAccelerator()
        super().setup_environment()
        # Evaluation goes on with the shares of training; another training starts over.
        if self._module.trainer.state.fn == "fit":
            self.balance = None
        self.loader, self._restored, self._clock = None, {}, None
        place = RankPlace(trainers, self.global_rank, self.local_rank, self.num_nodes, self.root_device)
        dtype = input_dtype(self.precision_plugin)
        self._loaders = HyScaleLoaders(options, place, self._group, dtype, self.balance, self._restored)

    @override
    def setup_distributed(self) -> None:
        """Connect the ranks; one alone needs no process group.

        Random numbers go on where they were, as in the plain Trainer, while DDP begins again with the global seed.
        """
        log.debug(f"{self.__class__.__name__}: creating the process group")
        self.set_world_ranks()
        if not self._alone:
            nodes, on_node = range(self.num_nodes), range(self.trainers.num_accelerators)
            accelerators = [node * self.num_processes + rank for node in nodes for rank in on_node]
            self._connect(self.options.stall_timeout, accelerators)

    @override
    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is not None:
            return self._process_group_backend
        kinds = {device.type for device in self.parallel_devices or []}
        return "cpu:gloo,cuda:nccl" if kinds == {"cuda"} else "gloo"

    # -- the model and the loaders

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        convert_batches(trainer)  # of any loader
        datamodule = getattr(trainer, "datamodule", None)
        if not self._alone and isinstance(datamodule, MiniBatchDataModule) and datamodule.needs_all_ranks:
            raise ValueError(
                "inference='full' on a partitioned graph needs all ranks, and hyscale evaluates what it cannot share "
                "out on one: leave inference out, or evaluate with strategy='ddp'"
            )
        super().setup(trainer)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: setting up a loader")
        assert self._loaders is not None
        # Lightning's batch size scaler sets up the loaders of validation while training, too, after that of training.
        trainer = self._module.trainer
        trains = trainer.state.stage == RunningStage.TRAINING and (
            trainer.fit_loop._combined_loader is None or trainer.fit_loop._should_reload_train_dl
        )
        loader = self._loaders.process(dataloader, self._module, trains)
        self.balance, self.loader = self._loaders.balance, self._loaders.loader
        return loader

    # -- training

    @override
    def on_train_start(self) -> None:
        """Make equal on all ranks what training changes, and take this rank's random numbers and threads."""
        if self._alone:
            return
        if len(getattr(self._module.trainer.fit_loop._combined_loader, "flattened", ())) > 1:
            raise ValueError("hyscale trains with one loader, but the DataModule returns several")
        assert self._group is not None
        assert self._loaders is not None
        self._own_threads = torch.get_num_threads()
        seed, common = self._group.all_gather_objects((torch.initial_seed(), torch.get_rng_state()))[0]
        # What hooks draw goes on where it was, and so does the order of an epoch that has not begun.
        resumed = self._loaders.resumed_rng
        torch.set_rng_state(common if resumed is None else resumed)
        streams = [each for each in self._restored.pop("random", None) or [] if isinstance(each, Tensor)]
        self._rng = RankRNG(seed, self.global_rank, streams[self.global_rank : self.global_rank + 1])
        super().on_train_start()
        self._clock = StageClock(self.root_device)
        self._loaders.resize()

    @override
    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Put into force what was decided for this iteration."""
        if self.balance is None or self._clock is None or self._loaders is None or self._training_sync is None:
            return
        self._clock.next_iteration(self._loaders.share)
        before = self.balance.threads, self.balance.shares
        self.balance.begin()
        if before != (self.balance.threads, self.balance.shares):
            self._loaders.resize()
        super().on_train_batch_start(batch, batch_idx)
        if self.balance.iteration % self.options.agree_every == 0:
            self.resync_parameters()
        self._is_observed = False

    @override
    def batch_weight(self) -> BatchWeight:
        assert self._loaders is not None
        return BatchWeight(self._loaders.share.seeds, self._loaders.share.total)

    @override
    @contextmanager
    def user_code(self, name: str) -> Iterator[None]:
        """Run the module's own code: watched, drawing from this rank's stream, and timed where it trains."""
        with ExitStack() as stack:
            if self._heartbeats is not None:
                stack.enter_context(self._heartbeats.working(name))
            if self._rng is not None:
                stack.enter_context(self._rng.activate())
            if self._clock is not None and name in ("training_step", "backward"):
                stack.enter_context(self._clock.working())
            yield

    @override
    def step_timings(self) -> Sequence[float]:
        return stage_row(None) if self._clock is None else self._clock.row

    @override
    def observe_step(self, summaries: list[StepSummary]) -> None:
        """Let the balance take what this node's ranks send of the iteration before, once per iteration."""
        self.drift = max(self.drift, *(one.drift for one in summaries))
        if self.balance is not None and not self._is_observed:
            self._is_observed = True
            first = self.global_rank - self.local_rank
            ranks = [first + self.trainers.rank_of(trainer) for trainer in range(self.num_processes)]
            self.balance.observe([summaries[rank].timings for rank in ranks])

    @override
    def predict_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Return what rank 0 has predicted."""
        if self._alone:
            return super().predict_step(*args, **kwargs)
        output: STEP_OUTPUT = None
        if self.global_rank == 0:
            with self.user_code("predict_step"):
                output = DDPStrategy.predict_step(self, *args, **kwargs)
        with self._waiting():
            output = self.broadcast(output)
        return output

    # -- the end

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._stop()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Name the rank that was lost, or let the other ranks know that this one failed; then end the pipeline."""
        super().on_exception(exception)
        self._stop()

    @override
    def teardown(self) -> None:
        """End the pipeline, and leave the other ranks when all are through."""
        self._stop()
        super().teardown()

    def _stop(self) -> None:
        """End all threads of the pipeline, and take back the number of torch's."""
        if self._clock is not None:
            torch.set_num_threads(self._own_threads)
        self._clock = None
        if self._loaders is not None:
            self._loaders.close()

    # -- checkpoints: what only this strategy needs lies under a key that others ignore

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        """Write a checkpoint, with which every rank can go on exactly; it loads without this strategy."""
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: saving a checkpoint")
        if self._group is not None and self.balance is not None and self._loaders is not None:
            alone = is_handling_exception()
            if self._training_sync is not None and not alone:
                self.resync_parameters()  # a resumed run begins with rank 0's
            state = None if self._rng is None else self._rng.state(), self.balance.state_dict()
            states = [state] * self._group.size if alone else self._group.all_gather_objects(state)
            nodes = range(self.num_nodes)
            checkpoint[self.strategy_name] = {
                "random": [stream for stream, _ in states],
                "balance": {str(node): states[node * self.num_processes][1] for node in nodes},
                "order": self._loaders.order_state(),
            }
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, whatever strategy wrote it."""
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: loading a checkpoint")
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._restored.clear()
        self._restored.update(checkpoint.get(self.strategy_name, {}))
        return checkpoint

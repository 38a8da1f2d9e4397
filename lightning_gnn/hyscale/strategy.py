"""Hybrid training (HyScale-GNN): CPUs and accelerators train one model together, with one process per trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack, override

from lightning_gnn.datamodules.base import MiniBatchDataModule
from lightning_gnn.distributed.exceptions import is_handling_exception
from lightning_gnn.distributed.monitored_ranks import RankOptions
from lightning_gnn.distributed.step_sync import BatchWeight, StepSummary
from lightning_gnn.distributed.weighted_ddp import WeightedDDPStrategy
from lightning_gnn.hyscale.admission import AdmittingLauncher
from lightning_gnn.hyscale.checks import check_precision
from lightning_gnn.hyscale.drm import BalanceController, StageClock, StepReport
from lightning_gnn.hyscale.loader_setup import HyScaleLoaders, RankInfo
from lightning_gnn.hyscale.options import (
    HyScaleOptions,
    TrainerSet,
    build_trainer_set,
)
from lightning_gnn.hyscale.rng_streams import RankRNG
from lightning_gnn.hyscale.sharded_loader import ShardedDataLoader
from lightning_gnn.runtime.checkpoint_io import SafeCheckpointIO
from lightning_gnn.runtime.devices import collective_backend
from lightning_gnn.runtime.lightning import (
    STEP_OUTPUT,
    CPUAccelerator,
    DDPStrategy,
    RunningStage,
    _StrategyRegistry,
    _SubprocessScriptLauncher,
    pl,
    rank_zero_warn,
)
from lightning_gnn.runtime.precision import convert_batches, input_dtype

log = logging.getLogger(__name__)


class HyScaleStrategy(WeightedDDPStrategy):
    """Synchronous SGD on CPU trainers and accelerators (HyScale-GNN, sections III and V), one process per trainer.

    The seeds of each mini-batch of the user's loader are split across the ranks. Every rank runs the whole
    LightningModule on a mini-batch of its seeds. Accelerators have the first ranks, CPU trainers the last. Each loss is
    weighted by the rank's share, so the gradient is exactly the weighted sum over the ranks' mini-batches. For losses
    averaged over seeds, it equals the gradient of the undivided mini-batch if a seed's output does not depend on the
    other seeds: all neighbors are sampled, and no layer uses batch statistics or mini-batch degrees (``GCNConv``).

    If the loss is not a mean over seeds, ``training_step`` returns ``{"loss": loss, "weight": weight}``. The weight is
    the loss's divisor (the number of counted labels or the sum of their class weights), or ``"sum"`` if the loss was
    not divided. Without it, the first mini-batches warn about losses of ``torch.nn.functional`` that need a weight.
    Manual optimization weights by seeds and must call ``self.manual_backward``.

    Buffers written in a step are synchronized across ranks. Values logged with ``self.log`` in a step become a mean
    weighted by ``batch_size``, or by seeds without it. Steps use a random stream private to the rank, hooks a stream
    shared by all ranks. Validation and testing are sharded too. Rank 0 runs prediction and broadcasts the results. A
    rank without seeds runs its step on one seed and discards all effects. Modules with uninitialized parameters
    (``in_channels=-1``) are refused.

    A single trainer behaves like the plain Trainer with prefetching. ``Trainer(deterministic=True)`` disables every
    choice based on measurements: equal shares, default threads, no load balancing. On several nodes, start one process
    per trainer and node (torchrun, SLURM, Ray); ``batch_size`` counts the seeds of all nodes.

    Args:
        cpu_trainers: CPU trainers per node, or ``"auto"``: one, unless the performance model predicts that it would not
            shorten an iteration by 5 %, or by 15 % where threads outnumber cores.
            ``Trainer(accelerator="cpu", devices=4)`` also sets four.
        cpu_share: Fraction of the seeds for the CPU trainers, in (0, 1], or ``"auto"``: the best value that the
            performance model predicts from short measurements, or the value in a checkpoint. ``drm`` may change it.
        drm: Whether to rebalance the work during training. ``"paper"`` follows algorithm 1 exactly; a path replays a
            recorded log. With ``False`` or a replay, a resumed run is bit-identical on this package's loaders.
        prefetch: 2: two-stage prefetching; 1: feature loading and data transfer in one stage; 0: no prefetching.
        stall_timeout: Seconds after which the run is aborted because a rank sends no heartbeat, a step does not
            finish, or a stage makes no progress. Stages are not monitored with ``prefetch=0``.
        transfer_dtype: Transfers features to accelerators as ``"float16"`` or row-quantized ``"int8"``; None: as is.
        shares: Fraction of the seeds of every trainer, CPU trainers first. Overrides ``cpu_share``.
        threads: CPU threads per node for sampling, feature loading and CPU trainers; by default derived from the
            loader's ``num_workers`` and the cores. Each rank gets its share of the first two, at least one.
        devices: The accelerators; by default the Trainer's. ``["cpu"]`` emulates an accelerator on the CPU.
        decision_log: File in which to record the decisions, one JSON line each, for a replay with ``drm``.
        accelerator_sampling: Initial fraction of the sampling that runs on accelerators, in [0, 1], or ``"auto"``: as
            measured, if they support it (CUDA, this package's loaders). ``drm`` may change it, and a replay overrides
            it. The mini-batches do not depend on it.
        agree_every: Iterations between broadcasts of rank 0's parameters and optimizer states, needed because
            different devices round differently. :attr:`drift` reports how far they had diverged.
        process_group_backend: By default gloo if CPUs train, otherwise also nccl or hccl, for GPUs or NPUs.
        **kwargs: Arguments of Lightning's ``DDPStrategy``, such as ``checkpoint_io`` (by default crash-safe) and
            ``start_method`` (not ``"fork"``).

    Raises:
        TypeError, ValueError: An option is unknown or out of range.

    Examples:
        On a machine with a GPU, ``Trainer(strategy="hyscale")`` trains on the GPU and the CPU. Here, on the CPU only:

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
        cpu_trainers: int | str = "auto",
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
        """The trainers of this node; empty until the devices are assigned."""
        self.balance: BalanceController | None = None
        """The shares of the trainers and the times of the last iterations; None until training starts."""
        self.loader: ShardedDataLoader | None = None
        """The training loader with its pipeline; None until training starts."""
        self.drift = 0.0
        """The largest difference of any rank's tensor from rank 0's, relative to the tensor's largest magnitude."""
        self._loaders: HyScaleLoaders | None = None
        self._rng: RankRNG | None = None
        self._clock: StageClock | None = None
        self._is_observed = False
        self._threads_before_training = torch.get_num_threads()
        self._restored: dict[str, Any] = {}
        if kwargs.get("checkpoint_io") is None:
            kwargs["checkpoint_io"] = SafeCheckpointIO()
        timeout = timedelta(seconds=max(1800.0, self.options.stall_timeout))
        super().__init__(timeout, process_group_backend, **kwargs)

    # -- ranks

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register ``strategy="hyscale"``."""
        strategy_registry.register(cls.strategy_name, cls)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this node's ranks, in rank order."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        """Add the CPU trainers to the Trainer's devices."""
        if devices is not None:
            number, accelerators = self.options.first_cpu_trainers, self.options.accelerators(devices)
            self.trainers = build_trainer_set(number, accelerators, devices)
            devices = self._devices_of_ranks()
        self._parallel_devices = devices

    def _devices_of_ranks(self) -> list[torch.device]:
        order = range(len(self.trainers.devices))
        return [self.trainers.devices[self.trainers.trainer_of_rank(rank)] for rank in order]

    @override
    def _configure_launcher(self) -> None:
        """Decide on CPU trainers before the processes start; where they exist already, a trial decides."""
        super()._configure_launcher()
        environment = self.cluster_environment
        assert environment is not None
        # Several nodes would each decide for themselves.
        is_alone = self.num_nodes == 1 and not environment.creates_processes_externally
        is_script = isinstance(self._launcher, _SubprocessScriptLauncher)
        if is_alone and is_script and self.options.admits_cpu_trainers(self.trainers):
            self._launcher = AdmittingLauncher(environment, self.num_processes, self.num_nodes)

    def admit(self, cpu_trainers: int) -> None:
        """Set the number of CPU trainers, before any process is started."""
        self.trainers = TrainerSet.of(cpu_trainers, self.trainers.accelerators)
        self._parallel_devices = self._devices_of_ranks()
        self.set_world_ranks()

    @property
    @override
    def rank_name(self) -> str:
        return f"trainer {self.trainers.names[self.trainers.trainer_of_rank(self.local_rank)]}"

    @override
    def setup_environment(self) -> None:
        """Check the options against the devices, connect the ranks, and prepare to shard the loaders."""
        options, trainers = self.options, self.trainers
        if options.shares is not None and len(options.shares) != len(trainers.devices):
            raise ValueError(
                f"shares has {len(options.shares)} entries, but there are {len(trainers.devices)} trainers (CPU "
                "trainers first)"
            )
        if options.cpu_share != "auto" and not (trainers.num_cpu and trainers.num_accelerators):
            rank_zero_warn(f"cpu_share={options.cpu_share} has no effect: the only trainers are {trainers.names}")
        if self._layer_sync is not None and trainers.num_cpu:
            rank_zero_warn("sync_batchnorm=True has no effect: each hyscale trainer normalizes its own mini-batches")
            self._layer_sync = None
        # All ranks share one sample order; rank 0 shuffles as a plain Trainer does.
        self._module.trainer._accelerator_connector.use_distributed_sampler = False
        check_precision(self.precision_plugin, trainers)
        if self.root_device.type == "cpu" and not isinstance(self.accelerator, CPUAccelerator):
            self.accelerator = CPUAccelerator()
        super().setup_environment()
        # Evaluation reuses the shares of training; a new fit starts over.
        if self._module.trainer.state.fn == "fit":
            self.balance = None
        self.loader, self._restored, self._clock = None, {}, None
        info = RankInfo(trainers, self.global_rank, self.local_rank, self.num_nodes, self.root_device)
        dtype = input_dtype(self.precision_plugin)
        self._loaders = HyScaleLoaders(options, info, self._group, dtype, self.balance, self._restored)

    @override
    def setup_distributed(self) -> None:
        """Connect several ranks; unlike DDP, do not reset the random state to the global seed."""
        log.debug(f"{self.__class__.__name__}: creating the process group")
        self.set_world_ranks()
        if not self._is_single_rank:
            nodes, on_node = range(self.num_nodes), range(self.trainers.num_accelerators)
            accelerators = [node * self.num_processes + rank for node in nodes for rank in on_node]
            self._connect(self.options.stall_timeout, accelerators)

    @override
    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or collective_backend(self.parallel_devices or [])

    # -- the model and the loaders

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        convert_batches(trainer)  # for every loader
        datamodule = getattr(trainer, "datamodule", None)
        if not self._is_single_rank and isinstance(datamodule, MiniBatchDataModule) and datamodule.needs_all_ranks:
            raise ValueError(
                "inference='full' on a partitioned graph needs all ranks, but hyscale evaluates loaders that it cannot "
                "shard on rank 0 only: omit inference, or evaluate with strategy='ddp'"
            )
        super().setup(trainer)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: setting up a loader")
        assert self._loaders is not None
        # Lightning's batch size scaler also sets up validation loaders while training, after the training loader.
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
        """Synchronize the training state of all ranks, and set up this rank's random stream and threads."""
        if self._is_single_rank:
            return
        if len(getattr(self._module.trainer.fit_loop._combined_loader, "flattened", ())) > 1:
            raise ValueError("hyscale trains with one loader, but the DataModule returns several")
        assert self._group is not None
        assert self._loaders is not None
        self._threads_before_training = torch.get_num_threads()
        seed, common = self._group.all_gather_objects((torch.initial_seed(), torch.get_rng_state()))[0]
        # Hooks and the order of an epoch that has not started continue from the previous random state.
        resumed = self._loaders.resumed_rng
        torch.set_rng_state(common if resumed is None else resumed)
        streams = [each for each in self._restored.pop("random", None) or [] if isinstance(each, Tensor)]
        self._rng = RankRNG(seed, self.global_rank, streams[self.global_rank : self.global_rank + 1])
        super().on_train_start()
        self._clock = StageClock(self.root_device)
        self._loaders.resize()

    @override
    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Apply the decisions that take effect in this iteration."""
        if self.balance is None or self._clock is None or self._loaders is None or self._training_sync is None:
            return
        self._clock.next_iteration(self._loaders.share)
        self._loaders.begin_iteration()
        assert self._group is not None
        self._group.only_accelerators = self.num_nodes == 1 and self.balance.only_accelerators
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
        """Run module code monitored by heartbeats, with this rank's random stream, and timed if it trains."""
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
        return StepReport() if self._clock is None else self._clock.report

    @override
    def observe_step(self, summaries: list[StepSummary]) -> None:
        """Pass the previous iteration's timings of this node's ranks to the controller, once per iteration."""
        self.drift = max(self.drift, *(one.drift for one in summaries))
        if self.balance is not None and not self._is_observed:
            self._is_observed = True
            first = self.global_rank - self.local_rank
            ranks = [first + self.trainers.rank_of_trainer(trainer) for trainer in range(self.num_processes)]
            self.balance.observe([StepReport(*summaries[rank].timings) for rank in ranks])

    @override
    def predict_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Return rank 0's predictions. All ranks must call this."""
        if self._is_single_rank:
            return super().predict_step(*args, **kwargs)
        output: STEP_OUTPUT = None
        if self.global_rank == 0:
            with self.user_code("predict_step"):
                output = DDPStrategy.predict_step(self, *args, **kwargs)
        with self.waiting():
            output = self.broadcast(output)
        return output

    # -- the end

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._group is not None:
            self._group.only_accelerators = False
        self._stop()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Name the rank that died, or notify the other ranks that this one failed; then stop the pipeline."""
        super().on_exception(exception)
        self._stop()

    @override
    def teardown(self) -> None:
        """Stop the pipeline, and leave the process group once all ranks have finished."""
        self._stop()
        super().teardown()

    def _stop(self) -> None:
        """Stop all pipeline threads and restore torch's number of threads."""
        if self._clock is not None:
            torch.set_num_threads(self._threads_before_training)
        self._clock = None
        if self._loaders is not None:
            self._loaders.close()

    # -- checkpoints: this strategy's state is stored under its own key, which other strategies ignore

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        """Write a checkpoint from which every rank resumes exactly; other strategies can load it, too."""
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: saving a checkpoint")
        saved: dict[str, Any] = {"cpu_trainers": self.trainers.num_cpu}
        checkpoint[self.strategy_name] = saved
        if self._group is not None and self.balance is not None and self._loaders is not None:
            only_this_rank = is_handling_exception()  # the other ranks cannot take part in a collective then
            if self._training_sync is not None and not only_this_rank:
                self.resync_parameters()  # a resumed run loads rank 0's parameters on all ranks
            state = None if self._rng is None else self._rng.state(), self.balance.state_dict()
            states = [state] * self._group.size if only_this_rank else self._group.all_gather_objects(state)
            nodes = range(self.num_nodes)
            saved |= {
                "random": [stream for stream, _ in states],
                "balance": {str(node): states[node * self.num_processes][1] for node in nodes},
                "order": self._loaders.order_state(),
            }
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint written by any strategy."""
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: loading a checkpoint")
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._restored.clear()
        self._restored.update(checkpoint.get(self.strategy_name, {}))
        return checkpoint

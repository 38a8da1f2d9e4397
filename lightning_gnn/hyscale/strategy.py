"""Hybrid training: CPUs and accelerators train one model together, a process for each (HyScale-GNN)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.core.optimizer import do_nothing_closure
from pytorch_lightning.plugins import Precision
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling
from lightning_gnn.hyscale.buffers import SharedBuffers
from lightning_gnn.hyscale.checks import check_precision, check_training, overrides_transfer
from lightning_gnn.hyscale.first_mapping import (
    begin_sampling,
    find_sampling,
    first_mapping,
    resumed_mapping,
    wanted_sampling,
)
from lightning_gnn.hyscale.loader import (
    PipelineSettings,
    Share,
    SharedBatches,
    SlicedLoader,
    StagedLoader,
    can_be_cut,
    split_seeds,
    whole_loader,
)
from lightning_gnn.hyscale.numa import pin_to_numa_node
from lightning_gnn.hyscale.options import (
    Trainers,
    allowed_drm,
    balances,
    check_devices,
    check_options,
    check_sampling,
    check_share,
    check_shares,
    check_threads,
    default_threads,
    measurements_decide,
    replays,
    seeds_of_iteration,
    trainers_of,
    turned_off,
)
from lightning_gnn.hyscale.random_streams import OwnStream
from lightning_gnn.hyscale.rank_group import RankGroup
from lightning_gnn.hyscale.shared_log import SharedLog
from lightning_gnn.hyscale.transfer import Transfer
from lightning_gnn.hyscale.work_balance import STAGES, StageClock, WorkBalance
from lightning_gnn.runtime.checkpoint_io import SafeCheckpointIO
from lightning_gnn.runtime.gradients import GradientMean
from lightning_gnn.runtime.heartbeat import fails_alone
from lightning_gnn.runtime.lazy_modules import uncounted
from lightning_gnn.runtime.losses import (
    LOOKS,
    Weight,
    agree_on_kind,
    returned_loss,
    returned_weight,
    warning_of,
    weighs_otherwise,
)
from lightning_gnn.runtime.messages import closest, keywords_of
from lightning_gnn.runtime.precision import convert_batches, input_dtype
from lightning_gnn.runtime.weighted_ddp import WeightedDDPStrategy
from lightning_gnn.sampling.loader import ThreadedNodeLoader

_KEY = "hyscale"
_LONGEST = 1e8
"""Seconds: nothing that waits takes infinity."""


@dataclass
class _Told:
    """What a rank tells of a step.

    Args:
        new: Whether it logged new names.
        kind: Of its loss's weight: 1 where none was returned, 2 a number, 3 ``"sum"``; 0 for no loss that counts.
        weight: Of its loss; its seeds where none was returned, 1 for ``"sum"``.
        wrote: Whether it wrote to buffers.
        drift: By how much it had drifted.
        stages: Its stage times of the iteration before.
        logged: What it logged.
    """

    seeds: float
    new: float
    kind: float = 0.0
    weight: Any = 0.0
    loss: Any = 0.0
    wrote: Any = 0.0
    drift: float = 0.0
    stages: Sequence[float] = (0.0,) * len(STAGES)
    logged: list[Any] = field(default_factory=list)

    def row(self) -> list[Any]:
        """Return it as numbers, some of which may lie on the device."""
        *numbers, stages, logged = vars(self).values()
        return [*numbers, *stages, *logged]

    @classmethod
    def of(cls, row: list[float]) -> _Told:
        """Take back what :meth:`row` returned."""
        seeds, new, kind, weight, loss, wrote, drift, *rest = row
        return cls(seeds, new, kind, weight, loss, wrote, drift, rest[: len(STAGES)], rest[len(STAGES) :])


class _Rows:
    """What the ranks tell one another of a training step, as the rider of their gradients."""

    def __init__(self, strategy: HyScaleStrategy) -> None:
        self._strategy = strategy
        self.factor = 1.0
        """Of the gradients."""

    def write(self, like: Tensor) -> Tensor:
        """Return what this rank tells."""
        assert self._strategy._group is not None
        return self._strategy._group.written(self._strategy._told_of("training_step").row(), like)

    def read(self, sums: Tensor) -> float:
        """Hear what all tell."""
        assert self._strategy._group is not None
        told = list(map(_Told.of, self._strategy._group.read(sums)))
        if self._strategy._only is not None:  # nobody else was asked, nor has logged anything that counts
            for rank, one in enumerate(told):
                if rank != self._strategy._only:
                    one.logged[1::2] = [math.nan] * (len(one.logged) // 2)
        self._strategy._hear("training_step", told)
        self.factor = self._strategy._factor(told)
        return self.factor


class HyScaleStrategy(WeightedDDPStrategy):
    """Synchronous SGD of CPU trainers and accelerators (HyScale-GNN, sections III and V), each a process of its own.

    Each iteration's seeds, a mini-batch of the user's loader, are shared out: every rank makes and trains on a
    mini-batch of its part, on the whole LightningModule, as under ``"ddp"``. The first ranks are the accelerators, the
    last the CPU trainers. Each loss weighs as much as its rank's share of the seeds, so that the gradient is exactly
    the weighted sum over the ranks' mini-batches. For losses that are means over seeds it equals that of the undivided
    mini-batch where a seed's result does not depend on the other seeds: with all neighbours, and without batch
    statistics or degrees inside the mini-batch (``GCNConv``). Normalisation layers see the rank's own mini-batch.

    For a loss that is no mean over seeds, ``training_step`` returns ``{"loss": loss, "weight": weight}``: what the loss
    was divided by (the number of labels that count, or the sum of their class weights), or ``"sum"`` where it was not
    divided. Ranks then weigh in by that, one of weight 0 not at all; where all weigh 0, the gradient is 0. Without,
    losses of ``torch.nn.functional`` that need it are warned about in the first mini-batches. Manual optimisation
    weighs by seeds, and must call ``self.manual_backward``.

    What the ranks write in a step is made one again: buffers (see
    :class:`~lightning_gnn.hyscale.buffers.SharedBuffers`), and what ``self.log`` is given in the three steps, a mean
    weighted by its ``batch_size`` or else by seeds. Steps draw random numbers from a stream of the rank's own, hooks
    from one that all ranks share. Validation and testing are shared out too; prediction is done by rank 0, whose
    results all ranks return. A rank without seeds runs its step on one seed, and leaves no trace of it.

    A lone trainer is the plain Trainer, in the process that there is; on an accelerator, mini-batches are prefetched.
    Loaders are those whose mini-batches are made of positions in a dataset; this package's node loaders run in the
    paper's stages. With several nodes, start a process for each trainer on each (torchrun, SLURM); ``batch_size``
    counts the seeds of all.

    With ``Trainer(deterministic=True)`` (or ``"warn"``) no measurement decides, and a warning says what that turns off:
    ``drm=True`` acts as False; with ``cpu_share="auto"`` all trainers have equal shares, and the threads that they have
    by default; with ``accelerator_sampling="auto"`` the CPU samples. A replay stays.

    Args:
        cpu_trainers: CPU trainers per node; ``"numa"``: one for each NUMA node, on its cores. ``Trainer(accelerator=
            "cpu", devices=4)`` means four, too.
        cpu_share: Part of the seeds for the CPU trainers, in (0, 1], or ``"auto"``: what the performance model finds
            best by short measurements; a resumed run goes on with what its checkpoint says. ``drm`` may change it.
        drm: Balance the work while it runs; ``"paper"``: by algorithm 1 to the letter, which noise keeps moving; or the
            path of a recorded log of decisions to replay. With ``False`` or a replay, a resumed run continues bit for
            bit on this package's loaders.
        prefetch: 2: two-stage prefetching; 1: feature loading and data transfer as one stage; 0: none.
        stall_timeout: Seconds after which a rank that gives no sign of life, a step that does not end, or a stage that
            makes no progress ends the run. With ``prefetch=0`` the stages run in the main thread, and are not watched.
        transfer_dtype: Features travel to accelerators as ``"float16"`` or row-quantised ``"int8"``; None: as they are.
        shares: Part of the seeds of every trainer, CPU trainers first; wins over ``cpu_share``.
        threads: CPU threads of sampling, feature loading and CPU trainers of a node; by default from the loader's
            ``num_workers`` and the cores. Each rank gets its share of the first two, at least one.
        devices: The accelerators; by default the Trainer's. ``["cpu"]`` lets the CPU stand for one.
        decision_log: Where to record the decisions, one JSON line each, for a replay by ``drm``.
        accelerator_sampling: Part of the sampling that accelerators do to begin with, in [0, 1], or ``"auto"``: as
            measured, where they can (CUDA, this package's loaders). Each samples for itself alone. ``drm`` may change
            it, and what it replays wins. The mini-batches do not depend on it.
        agree_every: Iterations after which parameters and states of optimizers become those of rank 0 again: unlike
            devices round differently. By how much they had parted is :attr:`drift`.
        process_group_backend: By default gloo where CPUs train, else what suits the devices.
        accelerator: What the devices are; None takes the trainer's.
        parallel_devices: This node's devices; None takes the trainer's, to which the CPU trainers are added.
        cluster_environment: How ranks find one another; None takes the trainer's.
        checkpoint_io: How checkpoints are written and read; by default in a way that a crash cannot damage.
        precision_plugin: Number formats of the steps; None takes the trainer's.
        start_method: How the other processes of this node are started: ``"popen"`` runs the script again, or, from a
            notebook, fresh processes that get what the notebook has; ``"fork"`` is refused with several trainers.

    Raises:
        ValueError: An option is out of range.
        TypeError: An option that nobody knows; says the closest one.

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

    strategy_name = _KEY
    brought_home = ("balance", "drift")

    def __init__(
        self,
        cpu_trainers: int | Literal["numa"] = 1,
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
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise TypeError(f"there is no option {name}{closest(name, keywords_of(HyScaleStrategy))}")
        check_options(cpu_trainers, drm, prefetch, stall_timeout, transfer_dtype, agree_every)
        self.cpu_trainers = cpu_trainers
        self.cpu_share = check_share(cpu_share)
        self.shares = check_shares(shares)
        self.threads = check_threads(threads)
        self.drm = drm
        self.decision_log = decision_log
        self.accelerator_sampling = check_sampling(accelerator_sampling)
        self.prefetch = prefetch
        self.stall_timeout = min(stall_timeout, _LONGEST)
        self.transfer_dtype = transfer_dtype
        self.agree_every = agree_every
        self.trainers = Trainers((), 0)
        """Who trains on this node, once it is known."""
        self.balance: WorkBalance | None = None
        """Who gets how much of the work, and the times of the last iterations, once training has begun."""
        self.loader: StagedLoader | SlicedLoader | None = None
        """The training loader with its pipeline, once there is one."""
        self.drift = 0.0
        """The largest difference, relative to a tensor's largest number, by which a rank's had parted from rank 0's."""
        self._wanted = check_devices(devices)
        self._sampling: AcceleratorSampling | None = None
        self._group: RankGroup | None = None
        self._log: SharedLog | None = None
        self._buffers: SharedBuffers | None = None
        self._stream: OwnStream | None = None
        self._gradients: GradientMean | None = None
        self._share = Share(0, 1, 1)
        self._weight: Weight | Tensor | None = None
        self._loss: Tensor | None = None
        self._whole_loss = 0.0
        self._looks = 0
        self._counts = self._told = self._synced = False
        self._only: int | None = None
        self._only_now: int | None = None
        self._drifted = 0.0
        self._base = 0
        self._parameters: list[Tensor] = []
        self._known: set[int] = set()
        self._clock: StageClock | None = None
        self._own_threads = torch.get_num_threads()
        self._restored: dict[str, Any] = {}
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=SafeCheckpointIO() if checkpoint_io is None else checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=max(1800.0, self.stall_timeout)),
            start_method=start_method,
        )

    # -- ranks

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this node's ranks."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        """Add the CPU trainers to what the Trainer has found."""
        if devices is not None:
            self.trainers = trainers_of(self.cpu_trainers, devices if self._wanted is None else self._wanted, devices)
            order = range(len(self.trainers.devices))
            devices = [self.trainers.devices[self.trainers.of_rank(rank)] for rank in order]
        self._parallel_devices = devices

    @property
    def trainer_index(self) -> int:
        """Which of this node's trainers this rank is, CPU trainers first."""
        return self.trainers.of_rank(self.local_rank)

    @property
    def accelerators(self) -> list[torch.device]:
        """The accelerators that train on this node."""
        return list(self.trainers.devices[self.trainers.num_cpu :])

    @override
    def _configure_launcher(self) -> None:
        processes = self.num_nodes * self.num_processes
        if self.world_size != processes:  # what Lightning would say of it has no word of cpu_trainers
            raise ValueError(
                f"hyscale has a process for each trainer, {self.num_processes} per node "
                f"({', '.join(self.trainers.names)}), together {processes}, but {self.world_size} were started; start "
                f"as many on each node, as with torchrun --nproc-per-node={self.num_processes}, or set cpu_trainers or "
                "Trainer(devices=...)"
            )
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        check_shares(self.shares, len(self.trainers.devices))
        self.loader, self._restored, self._clock = None, {}, None
        if self._module.trainer.state.fn == "fit":
            self.balance = None  # else evaluation goes on with the shares of training
        if self.cpu_share != "auto" and not (self.trainers.num_cpu and self.trainers.num_accelerators):
            rank_zero_warn(f"cpu_share={self.cpu_share} changes nothing: there are only {self.trainers.names}")
        if self._layer_sync is not None and self.trainers.num_cpu:
            rank_zero_warn("sync_batchnorm=True changes nothing: hyscale's trainers normalise their own mini-batches")
            self._layer_sync = None
        # One order for all; a random one is drawn by rank 0, as a plain Trainer would draw it.
        self._module.trainer._accelerator_connector.use_distributed_sampler = False
        check_precision(self.precision_plugin, self.trainers)
        if self.root_device.type == "cpu" and not isinstance(self.accelerator, CPUAccelerator):
            self.accelerator = CPUAccelerator()
        super().setup_environment()

    @override
    def setup_distributed(self) -> None:
        """Connect the ranks; one alone needs no process group.

        Random numbers go on where they were, as in the plain Trainer, while DDP begins again with the global seed.
        """
        self.set_world_ranks()
        if self._alone:
            return
        self._join(self.stall_timeout)
        if self._group is None:
            nodes = range(self.num_nodes)
            on_node = [rank for rank, device in enumerate(self.parallel_devices or []) if rank < len(self.accelerators)]
            self._group = RankGroup(
                (self.parallel_devices or []) * self.num_nodes,
                [node * self.num_processes + rank for node in nodes for rank in on_node],
                self.global_rank,
            )

    @override
    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is not None:
            return self._process_group_backend
        kinds = {device.type for device in self.parallel_devices or []}
        return "cpu:gloo,cuda:nccl" if kinds == {"cuda"} else "gloo"

    # -- the model

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Move the model to the device, make it the same on all ranks, and set up the optimizers."""
        convert_batches(trainer)  # of any loader
        if not self._alone and getattr(getattr(trainer, "datamodule", None), "needs_all_ranks", False):
            raise ValueError(
                "inference='full' on a partitioned graph needs all ranks, and hyscale evaluates what it cannot share "
                "out on one: leave inference out, or evaluate with strategy='ddp'"
            )
        super().setup(trainer)
        if self._alone:
            return
        if self._log is not None:
            self._log.remove()
        self._log = SharedLog(self._module)
        # What steps log is reduced already, without Lightning's knowing.
        warnings.filterwarnings("ignore", r"It is recommended to use .self\.log\(.*sync_dist=True")

    @override
    def configure_ddp(self) -> None:
        """Make parameters and buffers those of rank 0."""
        assert self._group is not None
        held = [*self._module.parameters(), *self._module.buffers()]
        self._group.copy_from_first([tensor for tensor in held if not is_lazy(tensor)])

    def _agree(self) -> None:
        """Make parameters and states of optimizers those of rank 0."""
        assert self._group is not None
        states: list[Tensor] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    states += [value for _, value in sorted(state.items()) if isinstance(value, Tensor)]
        self._drifted = max(self._drifted, self._group.copy_from_first([*self._trained(), *states]))

    # -- data

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        module = self._module
        if self._sets_up_training:
            # A lone trainer shares nothing; what cannot be prefetched in stages either is left as it is.
            if self._alone and (not self.trainers.num_accelerators or not can_be_cut(dataloader)):
                return dataloader
            check_training(dataloader, module)
            return self._training_loader(dataloader)
        if self._alone:
            return dataloader
        if not can_be_cut(dataloader):
            return whole_loader(dataloader, self._arrived, self.global_rank)
        if not module.trainer.predicting:
            split = partial(self._part, shares=self._evaluation_shares)
            return SlicedLoader(dataloader, self._batches(dataloader, split, rank=self.global_rank), self._arrived)
        if self.global_rank == 0:
            return dataloader
        return SlicedLoader(dataloader, self._batches(dataloader, lambda num_seeds, number: (0, 0)), self._arrived)

    @property
    def _sets_up_training(self) -> bool:
        """Whether a loader that is being set up is the one to train with."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is None or trainer.state.stage != RunningStage.TRAINING:
            return False
        # Lightning's batch size scaler sets up the loaders of validation in this stage too, after that of training.
        return trainer.fit_loop._combined_loader is None or trainer.fit_loop._should_reload_train_dl

    def _batches(self, dataloader: DataLoader[Any], split: Any, **more: Any) -> SharedBatches:
        return SharedBatches(dataloader, split, self.global_rank, **more)

    def _training_loader(self, dataloader: Any) -> StagedLoader | SlicedLoader:
        module = self._module
        if self.loader is not None:
            self.loader.close()
        own_hooks = overrides_transfer(module)
        if own_hooks and self.transfer_dtype is not None:
            rank_zero_warn(
                f"transfer_dtype={self.transfer_dtype!r} changes nothing: the module or DataModule overrides a hook of "
                "the transfer of batches"
            )
        accelerated = self.trainer_index >= self.trainers.num_cpu
        transfer = None
        if accelerated and not own_hooks and (self.root_device.type != "cpu" or self.transfer_dtype is not None):
            transfer = Transfer(self.root_device, self.transfer_dtype)
        staged = isinstance(dataloader, ThreadedNodeLoader)
        wanted = wanted_sampling(self.accelerator_sampling, allowed_drm(self.drm))
        here = staged and accelerated  # a CPU trainer leaves accelerators alone
        self._sampling = (
            find_sampling(wanted, dataloader, self.trainers, self._sampling, self.root_device) if here else None
        )
        start, stop = self._node_slice(seeds_of_iteration(dataloader))
        if self.balance is None or self.balance.total != stop - start:
            self.balance = self._begin_balance(dataloader, wanted, stop - start)
        batches = self._training_batches(dataloader)
        threads = self.balance.rank_threads(self.trainer_index)
        dtype = input_dtype(self.precision_plugin)
        if staged:
            settings = PipelineSettings(self.prefetch, threads[:2], self.balance.ahead, self.stall_timeout, dtype)
            self.loader = StagedLoader(
                dataloader, batches, settings, self._arrived, transfer, self._sampling, self._own_sampling
            )
        else:
            self.loader = SlicedLoader(dataloader, batches, self._arrived, transfer if self.prefetch else None, dtype)
        return self.loader

    def _training_batches(self, dataloader: Any) -> SharedBatches:
        trainer = self._module.trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress
        own = getattr(dataloader, "first_batch", None)
        if own is None and self._alone:
            own = lambda: 0  # noqa: E731  as a plain Trainer
        batches = self._batches(
            dataloader,
            self._split,
            first_batch=own or (lambda: progress.current.ready),
            num_batches=lambda: trainer.num_training_batches,
            on_epoch=self._begin_epoch,
            rank=None if self._alone else self.global_rank,
        )
        if getattr(dataloader, "first_batch", None) is None:  # else the DataModule sees to it
            batches.resumed = self._restored.pop("order", None)
        return batches

    def _node_slice(self, num_seeds: int) -> tuple[int, int]:
        """Return this node's equal part of an iteration's seeds: the first, and the one after the last."""
        node, nodes = self.global_rank // self.num_processes, self.num_nodes
        return num_seeds * node // nodes, num_seeds * (node + 1) // nodes

    def _split(self, num_seeds: int, number: int) -> tuple[int, int]:
        """Return this rank's part of a training iteration's seeds."""
        assert self.balance is not None
        start, stop = self._node_slice(num_seeds)
        first, last = self.balance.split(stop - start, self._base + number)[self.trainer_index]
        return start + first, start + last

    def _begin_epoch(self, first: int) -> None:
        """Count iterations from an epoch's first mini-batch that is trained on."""
        assert self.balance is not None
        self._base = self.balance.iteration - first

    def _part(self, num_seeds: int, number: int, shares: Any) -> tuple[int, int]:
        """Return this rank's part of the seeds of an evaluation's mini-batch."""
        start, stop = self._node_slice(num_seeds)
        first, last = split_seeds(stop - start, shares())[self.trainer_index]
        return start + first, start + last

    def _evaluation_shares(self) -> Sequence[float]:
        """Return the shares of this node's trainers in evaluation: those of training, or else a safe guess."""
        if self.balance is not None:
            return self.balance.shares
        if self.shares is not None:
            return self.shares
        if self.cpu_share == "auto" and self.trainers.num_accelerators:
            return [0.0] * self.trainers.num_cpu + [1.0] * self.trainers.num_accelerators
        return self.trainers.weights(self.cpu_share)

    def _own_sampling(self) -> float:
        assert self.balance is not None
        return self.balance.sampled_by(self.trainer_index)

    def _arrived(self, share: Share) -> None:
        """Know what this rank has of the mini-batch that comes next."""
        self._share = share

    def _begin_balance(self, dataloader: Any, wanted: str | float, total: int) -> WorkBalance:
        """Share the work out: as the user says, else as a checkpoint does, else by measurements, where these decide."""
        drm = allowed_drm(self.drm)
        if self._alone:
            drm = False  # there is nobody to share with
        if balances(drm) and not total:
            rank_zero_warn(
                f"hyscale: drm={drm!r} needs mini-batches of a known size, with seeds for every node; it is off"
            )
            drm = False
        num_workers = getattr(dataloader, "num_threads", None) or dataloader.num_workers
        shared = drm is not False or self.trainers.num_accelerators > 0  # what feeds accelerators needs cores, too
        threads = self.threads or default_threads(num_workers, self.trainers, shared)
        automatic = not replays(drm) and self.shares is None and self.cpu_share == "auto"
        states = self._restored.pop("balance", None)  # of older versions, a list
        state = states.get(str(self.global_rank // self.num_processes), {}) if isinstance(states, dict) else {}
        first, state = self._first(dataloader, wanted, total, threads, automatic, state)
        off = turned_off(self.trainers, self.drm, first[0] if automatic else None, self.accelerator_sampling)
        if off is not None and self.balance is None and not self._alone:
            rank_zero_warn(off)
        weights, threads, sampled_there = first
        workers = num_workers * (getattr(dataloader, "prefetch_factor", None) or 2)
        staged = 2 * (self.prefetch + 1) + (sampled_there > 0)
        balance = WorkBalance(
            self.trainers,
            weights,
            threads,
            total,
            drm,
            self.decision_log,
            max(staged, sum(threads), 0 if isinstance(dataloader, ThreadedNodeLoader) else workers + 3),
            sampled_there,
            speaks=self.local_rank == 0,
        )
        balance.load_state_dict(state)
        return balance

    def _first(
        self,
        dataloader: Any,
        wanted: str | float,
        total: int,
        threads: tuple[int, int, int],
        automatic: bool,
        state: dict[str, Any],
    ) -> tuple[tuple[list[float], tuple[int, int, int], float], dict[str, Any]]:
        """Return the first shares, threads and share of sampling on accelerators, the same on all ranks of a node.

        The first rank of the node measures alone while the others wait: measurements at the same time would disturb
        each other, and lead to mappings that differ.
        """
        found: Any = None
        if self.local_rank == 0:
            sampling, modelled, weights = self._sampling, None, self.shares
            before = None
            if automatic or (wanted == "auto" and sampling is not None):
                before, state = resumed_mapping(state, self.trainers, total)
            if before is not None:
                modelled = before.accelerator_sampling or None  # 0: nothing could sample there, and now it can
                if automatic:
                    weights, threads = list(before.shares), self.threads or before.threads_of(threads)
            if weights is None and automatic and not measurements_decide():
                weights = self.trainers.equal_weights
            if weights is None and automatic:
                dtype = None if overrides_transfer(self._module) else self.transfer_dtype
                best = first_mapping(self.trainers, dataloader, self._module, total, threads, sampling, dtype)
                if best is not None:
                    modelled = best.accelerator_sampling
                    weights, threads = list(best.shares), self.threads or best.threads
            if weights is None:
                weights = self.trainers.weights(self.cpu_share)
            there = begin_sampling(
                wanted, sampling, dataloader, total, threads[0], self.trainers.num_accelerators, modelled
            )
            found = ((weights, threads, there), state)
        if self._group is not None:
            found = self._group.objects(found)[self.global_rank - self.local_rank]
        return found  # type: ignore[no-any-return]

    # -- training

    @override
    def on_train_start(self) -> None:
        module = self._module
        if self._alone:
            return
        if len(getattr(module.trainer.fit_loop._combined_loader, "flattened", ())) > 1:
            raise ValueError("hyscale trains with one loader, but the DataModule returns several")
        assert self._group is not None
        self._own_threads = torch.get_num_threads()
        seed, common = self._group.objects((torch.initial_seed(), torch.get_rng_state()))[0]
        batches = None if self.loader is None else self.loader.batches
        # What hooks draw goes on where it was, and so does the order of an epoch that has not begun.
        torch.set_rng_state(common if batches is None or batches.resumed is None else batches.resumed[1])
        streams = [each for each in self._restored.pop("random", None) or [] if isinstance(each, Tensor)]
        self._stream = OwnStream(seed, self.global_rank, streams[self.global_rank : self.global_rank + 1])
        self._buffers = SharedBuffers(module)
        self._gradients = GradientMean(self._group.size, self._group.add_up)
        self._clock = StageClock(self.root_device)
        self._parameters = self._trained()
        self._group.copy_from_first(self._parameters)  # also those that only optimizers have
        self._known = set(map(id, self._parameters))
        self._looks, self._only_now = LOOKS, None
        if self.trainers.num_cpu and self.cpu_trainers == "numa":
            pin_to_numa_node(self.trainer_index, self.trainers.num_cpu)
        self._resize()

    def _resize(self) -> None:
        """Take the threads that this rank has now."""
        if self.balance is None or self.loader is None or self._alone:
            return
        sampling, loading, training = self.balance.rank_threads(self.trainer_index)
        self.loader.resize((sampling, loading))
        if torch.get_num_threads() != training:
            torch.set_num_threads(training)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Put into force what was decided for this iteration."""
        if self._alone or self.balance is None or self._clock is None:
            return
        self._clock.next_iteration(self._share)
        threads = self.balance.threads, self.balance.shares
        self.balance.begin()
        if threads != (self.balance.threads, self.balance.shares):
            self._resize()
        self._parameters = self._trained()
        new = [parameter for parameter in self._parameters if id(parameter) not in self._known]
        if new:  # drawn at random, they may be others on each rank
            assert self._group is not None
            self._group.copy_from_first(new)
            self._known.update(map(id, new))
        if self.balance.iteration % self.agree_every == 0:
            self._agree()
        self._told = False
        last, self._only_now = self._only_now, self._only_rank()
        self._only = last if last == self._only_now else None  # ranks tell of the iteration before
        # Gradients that are held over from an earlier mini-batch are those of all ranks, if they were then.
        self._synced = self._synced and any(parameter.grad is not None for parameter in self._parameters)

    def _only_rank(self) -> int | None:
        """Return the rank that has all seeds of this iteration, None if there are several."""
        assert self.balance is not None
        parts = self.balance.split(self._share.total, self.balance.iteration - 1)
        having = [trainer for trainer, (start, stop) in enumerate(parts) if stop > start]
        return self.trainers.rank_of(having[0]) if len(having) == 1 and self.num_nodes == 1 else None

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._alone or self._clock is None:
            return super().training_step(*args, **kwargs)
        automatic = self._module.automatic_optimization
        if self.initialize_lazy(super().training_step, *args, **kwargs):
            assert self._buffers is not None
            self._buffers.note()
            self._parameters = self._trained()
            self._known = set(map(id, self._parameters))
        self._counts, self._weight = self._share.seeds > 0, None
        with self._step("training_step"), self._clock.working():
            output = super().training_step(*args, **kwargs)
        if not automatic:
            self._loss = None
            self._tell("training_step")
            return output
        loss = output.get("loss") if isinstance(output, dict) else output
        if loss is None:  # the other ranks may have one
            self._counts = False
            loss = output = torch.zeros((), device=self.root_device, requires_grad=True)
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(
                f"training_step must return a loss of one number, but that of trainer {self._name} has the shape "
                f"{list(loss.shape)}"
            )
        self._loss = loss.detach() if isinstance(loss, Tensor) else None
        if self._counts:
            self._weight = returned_weight(output, on_host=False)
            self._look(output)
        return output

    @property
    def _name(self) -> str:
        return self.trainers.names[self.trainer_index]

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        """Run a step of the module: what it logs is collected, and leaves no trace where this rank has no seeds."""
        assert self._log is not None
        seeds = self._share.seeds
        trace = nullcontext() if seeds else uncounted(self._module)
        with self._running(name), self._log.step(name, seeds), trace:
            yield

    @contextmanager
    def _running(self, name: str) -> Iterator[None]:
        """Run the user's code: watched, drawing from this rank's stream."""
        watched = nullcontext() if self._heartbeats is None else self._heartbeats.working(name)
        stream = nullcontext() if self._stream is None else self._stream.drawn_from()
        with watched, stream:
            yield

    def _waiting(self) -> Any:
        """Wait for other ranks, which is no sign that this one hangs."""
        return nullcontext() if self._heartbeats is None else self._heartbeats.waiting()

    def _look(self, output: Any) -> None:
        """Warn, once, of a loss that needs a weight."""
        if self._looks and self._weight is None and (loss := returned_loss(output)) is not None:
            self._looks -= 1
            if (why := weighs_otherwise(loss, self._share.seeds)) is not None:
                self._looks = 0
                warnings.warn(warning_of(why, "hyscale's trainers", "seeds"), stacklevel=2)

    def _tell(self, step: str) -> list[_Told]:
        """Tell the other ranks what this one has of a step, and hear what they have; all ranks come here together."""
        assert self._group is not None
        with self._waiting():
            told = list(map(_Told.of, self._group.table(self._told_of(step).row())))
            self._hear(step, told)
        return told

    def _told_of(self, step: str) -> _Told:
        """Return what this rank tells of a step."""
        assert self._log is not None
        told = _Told(float(self._share.seeds), float(self._log.is_new), logged=self._log.row())
        if step == "training_step":
            assert self._clock is not None
            assert self._buffers is not None
            if self._counts:
                weight = self._weight
                told.kind, told.weight = (1.0, told.seeds) if weight is None else (2.0, weight)
                if isinstance(weight, str):
                    told.kind, told.weight = 3.0, 1.0
                told.loss = 0.0 if self._loss is None else self._loss
            told.wrote, told.drift, told.stages = self._buffers.changed(), self._drifted, self._clock.row
        return told

    def _hear(self, step: str, told: list[_Told]) -> None:
        """Take what all ranks have told of a step; all come here together."""
        assert self._group is not None
        assert self._log is not None
        logged = [one.logged for one in told]
        if any(one.new for one in told):
            self._log.learn()
            logged = self._group.table(self._log.row())
        self._log.flush(step, logged)
        if step != "training_step":
            return
        if any(one.wrote for one in told):
            assert self._buffers is not None
            self._buffers.join([int(one.seeds) for one in told])
        self._observe(told)

    def _observe(self, told: list[_Told]) -> None:
        """Let the balance take what the ranks of this node tell of the iteration before, once per iteration."""
        self.drift = max(self.drift, *(one.drift for one in told))
        if self.balance is not None and not self._told:
            self._told = True
            node = self.global_rank - self.local_rank
            places = [node + self.trainers.rank_of(trainer) for trainer in range(self.num_processes)]
            self.balance.observe([told[place].stages for place in places])

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute gradients of the undivided mini-batch's loss: the sum of the ranks' losses, by their weights."""
        if self._alone or self._clock is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        module, precision = self._module, self.precision_plugin
        assert self._group is not None
        assert self._gradients is not None
        parameters = self._parameters
        automatic = module.automatic_optimization
        # The weights' sum divides the gradients if these are new: one message for all, and nobody waits before it.
        late = (
            automatic
            and self.sync_gradients
            and module.trainer.accumulate_grad_batches == 1
            and getattr(precision, "scaler", None) is None
            and all(parameter.grad is None for parameter in parameters)
            and any(parameter.requires_grad for parameter in parameters)
        )
        part: float | Tensor = self._share.seeds / self._share.total
        if not self._counts:
            part = 0.0
        elif automatic and self._weight is not None:
            part = 1.0 if isinstance(self._weight, str) else self._weight / self._share.total
        if automatic and not late:
            part = part * self._factor(self._tell("training_step"))
        if not automatic:
            self._look(closure_loss)
        loss = precision.pre_backward(closure_loss, module)
        if isinstance(part, Tensor) or part:
            with self._running("backward"), self._clock.working():
                precision.backward(loss * (part * self._group.size), module, optimizer, *args, **kwargs)
        rows = _Rows(self) if late else None
        if late and self._counts and isinstance(self._weight, float | Tensor) and not float(self._weight):
            for parameter in parameters:  # a mean of nothing may be NaN, which must not get in
                parameter.grad = None
        add_up = None
        if late and self._only is not None:
            add_up = partial(self._group.replace, source=self._only)
        if self.sync_gradients:
            with self._waiting():
                self._gradients.take(parameters, rider=rows, add_up=add_up)
            self._synced = True
        if rows is not None and not rows.factor:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        return precision.post_backward(loss, module)

    def _factor(self, told: list[_Told]) -> float:
        """Return by what gradients are multiplied whose losses were weighted by their weights over all seeds."""
        none, numbers, sums = (sum(one.kind == kind for one in told) for kind in (1, 2, 3))
        agree_on_kind(none, numbers, sums)
        for one in told:
            if not (math.isfinite(one.weight) and one.weight >= 0):
                raise ValueError(
                    f"the weight that training_step returns must be finite and not negative, but is {one.weight:g}"
                )
        whole = math.fsum(one.weight for one in told)
        losses = [one.loss * one.weight for one in told if one.weight]
        self._whole_loss = math.fsum(losses) / (whole if whole and not sums else 1.0)
        if not numbers:
            return 1.0
        return self._share.total / whole if whole else 0.0

    @override
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        if self._alone or self._clock is None or self.lightning_module is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if not self._module.automatic_optimization:
            held = any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
            if held and not self._synced and closure is do_nothing_closure:
                raise RuntimeError("with hyscale, call self.manual_backward(loss) instead of loss.backward()")
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def whole() -> Any:
            """Return the undivided mini-batch's loss, by which optimizers that search must decide alike."""
            loss = closure()
            return loss if loss is None else torch.full_like(loss, self._whole_loss)

        return super().optimizer_step(optimizer, whole, model, **kwargs)

    # -- evaluation

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("validation_step", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("test_step", super().test_step, args, kwargs)

    def _evaluated(self, name: str, step: Any, args: Any, kwargs: Any) -> Any:
        if self._alone or self._log is None:
            return step(*args, **kwargs)
        self.initialize_lazy(step, *args, **kwargs)
        with self._step(name):
            output = step(*args, **kwargs)
        self._tell(name)
        return output

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return what rank 0 has predicted."""
        if self._alone:
            return super().predict_step(*args, **kwargs)
        output = None
        if self.global_rank == 0:
            with self._running("predict_step"):
                output = super().predict_step(*args, **kwargs)
        with self._waiting():
            return self.broadcast(output)

    # -- the end

    @override
    def on_train_end(self) -> None:
        self._stop()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)  # first of all, the other ranks hear of it
        self._stop()

    @override
    def teardown(self) -> None:
        self._stop()
        self._sampling = None
        if self._log is not None:
            self._log.remove()
            self._log = None
        super().teardown()

    def _stop(self) -> None:
        """End all threads of the pipeline, and take back the number of torch's."""
        if self._clock is not None:
            torch.set_num_threads(self._own_threads)
        self._clock = None
        hanging = [] if self.loader is None else self.loader.close()
        if hanging:
            rank_zero_warn(f"hyscale could not end {hanging}: they hang in a call that Python cannot interrupt")

    # -- checkpoints: what only this strategy needs lies under a key that others ignore

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, with which every rank can go on exactly; it loads without this strategy."""
        if self._group is not None and self.balance is not None:
            alone = fails_alone()
            if self._clock is not None and not alone:
                self._agree()  # a resumed run begins with rank 0's
            stream = None if self._stream is None else self._stream.state()
            state = stream, self.balance.state_dict()
            states = [state] * self._group.size if alone else self._group.objects(state)
            batches = None if self.loader is None else self.loader.batches
            order = None
            if batches is not None and batches.order_state is not None:
                order = (batches.order_state, torch.get_rng_state())
            nodes = range(self.num_nodes)
            checkpoint[_KEY] = {
                "random": [stream for stream, _ in states],
                "balance": {str(node): states[node * self.num_processes][1] for node in nodes},
                "order": order,
            }
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._restored = dict(checkpoint.get(_KEY, {}))
        return checkpoint

"""Hybrid training: CPUs and accelerators of a node train one model together (HyScale-GNN)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling
from lightning_gnn.hyscale.checks import (
    check_precision,
    check_training,
    draws_nothing,
    input_dtype,
    overrides_transfer,
    refuse_trained_features,
    share_one_order,
)
from lightning_gnn.hyscale.first_mapping import (
    begin_sampling,
    find_sampling,
    first_mapping,
    resumed_mapping,
    wanted_sampling,
)
from lightning_gnn.hyscale.node_strategy import NodeStrategy, check_same_order
from lightning_gnn.hyscale.options import (
    Trainers,
    allowed_drm,
    check_devices,
    check_options,
    check_sampling,
    check_share,
    check_shares,
    check_threads,
    default_threads,
    measurements_decide,
    seeds_of_iteration,
    turned_off,
)
from lightning_gnn.hyscale.pipeline import HybridBatch, HybridLoader, PipelineSettings, converted
from lightning_gnn.hyscale.trainers import HybridTrainers
from lightning_gnn.hyscale.work_balance import WorkBalance
from lightning_gnn.ops.hashing import mix
from lightning_gnn.runtime.checkpoint_io import SafeCheckpointIO
from lightning_gnn.runtime.devices import match_device

_BEFORE = "_on_before_batch_transfer"


class TransferHooks:
    """Calls the hooks of a LightningModule or its DataModule once per mini-batch, as they expect batches of PyG.

    Args:
        module: The module; hooks of a DataModule are called through it too.
        devices: Where each trainer's mini-batch goes.
    """

    def __init__(self, module: pl.LightningModule, devices: Sequence[torch.device]) -> None:
        self._module = module
        self._devices = list(devices)

    def install(self) -> None:
        """Stand in for the module's method that Lightning calls before the transfer."""
        self._module.__dict__[_BEFORE] = self._before

    def remove(self) -> None:
        """Give the module its own method back."""
        self._module.__dict__.pop(_BEFORE, None)

    def move(self, batch: HybridBatch, dataloader_idx: int = 0) -> HybridBatch:
        """Let the hooks move each mini-batch to its trainer."""
        for trainer in batch.active:
            part, device = batch.parts[trainer], self._devices[trainer]
            batch.parts[trainer] = self._module._apply_batch_transfer_handler(part, device, dataloader_idx)
        return batch

    def _before(self, batch: Any, dataloader_idx: int = 0) -> Any:
        original = type(self._module)._on_before_batch_transfer
        if not isinstance(batch, HybridBatch):
            return original(self._module, batch, dataloader_idx)
        for trainer in batch.active:
            batch.parts[trainer] = original(self._module, batch.parts[trainer], dataloader_idx)
        return batch


_KEY = "hyscale"
_LONGEST = 1e8
"""Seconds: nothing that waits takes infinity."""


class HyScaleStrategy(NodeStrategy):
    """Synchronous SGD of CPU trainers and accelerators in one process per node (HyScale-GNN, sections III and V).

    Each iteration's seeds, a mini-batch of the user's PyG node loader, are shared out: every trainer has a thread, a
    replica of the LightningModule and a mini-batch of its own. Their losses weigh as much as their shares of the seeds;
    the gradients are added, one optimizer steps, the replicas follow. The gradient is exactly the weighted sum over the
    trainers' mini-batches. For losses that are means over seeds it equals that of the undivided mini-batch where a
    seed's result does not depend on the other seeds: with all neighbours, and without batch statistics or degrees
    inside the mini-batch (``GCNConv``). Normalisation layers see the trainer's own mini-batch, and their running
    statistics become the trainers' weighted mean.

    For a loss that is no mean over seeds, ``training_step`` returns ``{"loss": loss, "weight": weight}``: what the loss
    was divided by (the number of labels that count, or the sum of their class weights), or ``"sum"`` where it was not
    divided. Trainers then weigh in by that, one of weight 0 not at all; where all weigh 0, the gradient is 0. Without,
    losses of ``torch.nn.functional`` that need it are warned about in the first mini-batches. ``self.log`` weighs by
    its ``batch_size``, or else by seeds, and manual optimisation by seeds, in any case.

    ``training_step`` runs once per trainer; ``self.log`` logs once. Trainers go on to the backward pass by themselves:
    ``on_before_backward`` comes after it, except where the module has its own ``backward`` or optimises manually. A
    lone trainer does all that a plain Trainer's step does, in its thread. Batches must come through a DataModule or
    ``train_dataloader``. With several nodes, start one process on each (torchrun, SLURM): all go through the same order
    of seeds, each takes an equal part of every mini-batch, so ``batch_size`` counts the seeds of all nodes.

    With ``Trainer(deterministic=True)`` (or ``"warn"``) no measurement decides, and a warning says what that turns off:
    ``drm=True`` acts as False; with ``cpu_share="auto"`` all trainers have equal shares, and the threads that they have
    by default; with ``accelerator_sampling="auto"`` the CPU samples. A replay stays.

    Args:
        cpu_trainers: CPU trainers per node; more than one for several NUMA nodes.
        cpu_share: Part of the seeds for the CPU trainers, in (0, 1], or ``"auto"``: what the performance model finds
            best by short measurements; a resumed run goes on with what its checkpoint says. ``drm`` may change it.
        drm: Balance the work while it runs (algorithm 1); or the path of a recorded log of decisions to replay. With
            ``False`` or a replay, a resumed run continues bit for bit on this package's loaders.
        prefetch: 2: two-stage prefetching; 1: feature loading and data transfer as one stage; 0: none.
        stall_timeout: Seconds after which a trainer, a stage or a node that shows no sign of life ends the run. With
            ``prefetch=0`` the stages run in the main thread, and are not watched.
        transfer_dtype: Features travel to accelerators as ``"float16"`` or row-quantised ``"int8"``; None: as they are.
        shares: Part of the seeds of every trainer, CPU trainers first; wins over ``cpu_share``.
        threads: CPU threads of sampling, feature loading and CPU trainers; by default from the loader's ``num_workers``
            and torch's number of threads.
        devices: The accelerators; by default the Trainer's. ``["cpu"]`` lets the CPU stand for one.
        decision_log: Where to record the decisions, one JSON line each, for a replay by ``drm``.
        accelerator_sampling: Part of the sampling that accelerators do to begin with, in [0, 1], or ``"auto"``: as
            measured, where they can (CUDA, this package's loaders). ``drm`` may change it, and what it replays wins.
            The mini-batches do not depend on it.
        process_group_backend: Of several nodes; by default what suits the device.
        **kwargs: Of :class:`~pytorch_lightning.strategies.ParallelStrategy`.

    Raises:
        ValueError: An option is out of range.

    Examples:
        Two CPU trainers share every mini-batch of eight seeds:

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
        >>> trainer = pl.Trainer(max_epochs=1, accelerator="cpu", strategy=HyScaleStrategy(cpu_trainers=2, drm=False),
        ...     logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        >>> trainer.fit(Classifier(), data)
        >>> trainer.global_step, trainer.strategy.trainers.names
        (4, ['0 (CPU)', '1 (CPU)'])
    """

    strategy_name = _KEY

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
        process_group_backend: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(process_group_backend, **{"checkpoint_io": SafeCheckpointIO(), **kwargs})
        check_options(cpu_trainers, drm, prefetch, stall_timeout, transfer_dtype)
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
        self.balance: WorkBalance | None = None
        """Who gets how much of the work, and the times of the last iterations, once training has begun."""
        self.loader: HybridLoader | None = None
        """The training loader with its pipeline, once there is one."""
        self.trainers: Trainers | None = None
        """Who trains, once it is known."""
        self._wanted = check_devices(devices)
        self._sampling: AcceleratorSampling | None = None
        self._engine: HybridTrainers | None = None
        self._hooks: TransferHooks | None = None
        self._observed: HybridBatch | None = None
        self._restored: dict[str, Any] = {}
        self._random_states: list[Any] = []

    # -- devices and nodes

    @property
    def accelerators(self) -> list[torch.device]:
        """The accelerators that train."""
        if self._wanted is not None:
            return self._wanted
        return [device for device in self.parallel_devices or [] if device.type != "cpu"]

    @property
    @override
    def root_device(self) -> torch.device:
        accelerators = self.accelerators
        return accelerators[0] if accelerators else torch.device("cpu")

    @override
    def setup_environment(self) -> None:
        on_cpu = [device for device in self.parallel_devices or [] if device.type == "cpu"]
        if len(on_cpu) > 1 and self._wanted is None and len(on_cpu) != self.cpu_trainers:
            raise ValueError(
                f"Trainer(accelerator='cpu', devices={len(on_cpu)}): hyscale has one process per node; "
                f"set its cpu_trainers={len(on_cpu)} and leave devices at 1"
            )
        self.balance, self.loader, self._restored, self._random_states = None, None, {}, []
        self.trainers = Trainers.of(self.cpu_trainers, self.accelerators)
        check_shares(self.shares, len(self.trainers.devices))
        if self.cpu_share != "auto" and not (self.cpu_trainers and self.trainers.num_accelerators):
            rank_zero_warn(f"cpu_share={self.cpu_share} changes nothing: there are only {self.trainers.names}")
        if self._layer_sync is not None:
            rank_zero_warn("sync_batchnorm=True changes nothing: hyscale's trainers normalise their own mini-batches")
        match_device(self.precision_plugin, self.root_device)
        check_precision(self.precision_plugin, self.trainers)
        super().setup_environment()
        self.join_nodes(self.stall_timeout)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # -- data

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        if not self.sets_up_training:
            return dataloader
        module = self.lightning_module
        assert module is not None
        assert self.trainers is not None
        check_training(dataloader, module)
        if self._num_nodes > 1:
            refuse_trained_features(dataloader)
            share_one_order(dataloader)
        if self.loader is not None:
            self.loader.close()
        self._hooks = TransferHooks(module, self.trainers.devices) if overrides_transfer(module) else None
        if self._hooks is not None and self.transfer_dtype is not None:
            rank_zero_warn(
                f"transfer_dtype={self.transfer_dtype!r} changes nothing: the module or DataModule overrides a hook of "
                "the transfer of batches"
            )
        progress = module.trainer.fit_loop.epoch_loop.batch_progress
        wanted = wanted_sampling(self.accelerator_sampling, allowed_drm(self.drm))
        self._sampling = find_sampling(wanted, dataloader, self.trainers, self._sampling)
        start, stop = self.node_slice(seeds_of_iteration(dataloader))
        if self.balance is None or self.balance.total != stop - start:
            self.balance = self._begin_balance(dataloader, wanted, stop - start)
            self._resize(self.balance.threads)
        self.loader = HybridLoader(
            dataloader,
            self._split,
            PipelineSettings(
                devices=self._destinations(dataloader),
                prefetch=self.prefetch,
                threads=self.balance.threads[:2],
                stall_timeout=self.stall_timeout,
                transfer_dtype=self.transfer_dtype,
                dtype=input_dtype(self.precision_plugin),
            ),
            first_batch=lambda: progress.current.ready,
            num_batches=lambda: module.trainer.num_training_batches,
            on_epoch=self._begin_epoch,
            sampling=self._sampling,
            share=self._share,
        )
        order = self._restored.pop("order", None)
        # That sampler draws from a generator of its own, and our DataModules see to the orders of their loaders.
        if not isinstance(dataloader.sampler, DistributedSampler) and getattr(dataloader, "first_batch", None) is None:
            self.loader.resumed = order
        return self.loader

    def _destinations(self, dataloader: Any) -> list[torch.device | None]:
        """Return where the pipeline brings each trainer's mini-batch, None where it is as it should be."""
        assert self.trainers is not None
        destinations = self.trainers.destinations(self.transfer_dtype)
        if self._hooks is not None:
            return [None] * len(destinations)
        sampled_on = torch.device(getattr(dataloader.node_sampler, "device", None) or "cpu")
        return destinations if sampled_on.type == "cpu" else list(self.trainers.devices)

    def _begin_balance(self, dataloader: Any, wanted: str | float, total: int) -> WorkBalance:
        """Share the work out: as the user says, else as a checkpoint does, else by measurements, where these decide."""
        assert self.trainers is not None
        sampling, modelled = self._sampling, None
        drm = allowed_drm(self.drm)
        if drm is True and not total:
            rank_zero_warn("hyscale: drm=True needs mini-batches of a known size, with seeds for every node; it is off")
            drm = False
        num_workers = getattr(dataloader, "num_threads", None) or dataloader.num_workers
        threads = self.threads or default_threads(num_workers, self.cpu_trainers > 0, drm is not False)
        automatic = isinstance(drm, bool) and self.shares is None and self.cpu_share == "auto"
        weights, before = self.shares, None
        states = self._restored.pop("balance", None) or []
        state = states[self.global_rank] if self.global_rank < len(states) else {}
        if automatic or (wanted == "auto" and sampling is not None):
            before, state = resumed_mapping(state, self.trainers, total)
        if before is not None:
            modelled = before.accelerator_sampling or None  # 0: nothing could sample there, and now it can
            if automatic:
                weights, threads = list(before.shares), self.threads or before.threads_of(threads)
        if weights is None and automatic and not measurements_decide():
            weights = self.trainers.equal_weights
        if weights is None and automatic:
            assert self.lightning_module is not None
            first = first_mapping(
                self.trainers,
                dataloader,
                self.lightning_module,
                total,
                threads,
                sampling,
                None if self._hooks is not None else self.transfer_dtype,
            )
            if first is not None:
                modelled = first.accelerator_sampling
                weights, threads = list(first.shares), self.threads or first.threads
        if weights is None:
            weights = self.trainers.weights(0.5 if self.cpu_share == "auto" else float(self.cpu_share))
        off = turned_off(self.trainers, self.drm, weights if automatic else None, self.accelerator_sampling)
        if off is not None and self.balance is None:
            rank_zero_warn(off)
        there = begin_sampling(wanted, sampling, dataloader, total, threads[0], modelled)
        lag = 2 * (self.prefetch + 1) + (0 if sampling is None or not self.prefetch else 1 + len(sampling))
        balance = WorkBalance(self.trainers, weights, threads, total, drm, self._resize, self.decision_log, lag, there)
        balance.load_state_dict(state)
        return balance

    def _resize(self, threads: tuple[int, int, int]) -> None:
        """Give the tasks other numbers of CPU threads."""
        if self.loader is not None:
            self.loader.resize(threads[:2])
        if self._engine is not None:
            self._engine.resize(threads[2])

    def _split(self, num_seeds: int, number: int) -> list[tuple[int, int]]:
        """Cut an iteration's seeds among this node's trainers."""
        assert self.balance is not None
        start, stop = self.node_slice(num_seeds)
        return [(start + first, start + last) for first, last in self.balance.split(stop - start)]

    def _share(self) -> float:
        """Return the share of an iteration's sampling that accelerators do, after its seeds were cut."""
        return 0.0 if self.balance is None else self.balance.accelerator_sampling

    def _begin_epoch(self, seeds: list[int]) -> None:
        assert self.balance is not None
        self.balance.restart()
        if self._num_nodes > 1:
            check_same_order(seeds)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if not isinstance(batch, HybridBatch):
            batch = converted(batch, input_dtype(self.precision_plugin))
            return super().batch_to_device(batch, device, dataloader_idx)
        return batch if self._hooks is None else self._hooks.move(batch, dataloader_idx)

    # -- training

    @override
    def on_train_start(self) -> None:
        module = self.lightning_module
        assert module is not None
        assert self.trainers is not None
        assert self.balance is not None
        if len(getattr(module.trainer.fit_loop._combined_loader, "flattened", ())) > 1:
            raise ValueError("hyscale trains with one loader, but the DataModule returns several")
        self._close_engine()
        seed: int | None = mix(torch.initial_seed() + self.global_rank * 1_000_003)
        if len(self.trainers.devices) == self._num_nodes == 1 and self.loader and draws_nothing(self.loader.loader):
            seed = None
        self._engine = HybridTrainers(self, self.trainers.devices, self.trainers.names, self.stall_timeout, seed)
        if (states := self._restored.pop("random", None)) is not None and self.global_rank < len(states):
            self._engine.load_state_dict(states[self.global_rank])
        self._engine.resize(self.balance.threads[2])
        if self._hooks is not None:
            self._hooks.install()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._engine is None or not isinstance(args[0], HybridBatch):
            return super().training_step(*args, **kwargs)
        self._observe()  # the last iteration, if it ended without a backward pass
        output = self._engine.training_step(*args, **kwargs)
        if self.lightning_module is not None and not self.lightning_module.automatic_optimization:
            self._observe()
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        plain = super().backward
        if self._engine is None or not self._engine.waits_for_backward:
            return plain(closure_loss, optimizer, *args, **kwargs)
        loss = self._engine.backward(closure_loss, optimizer, plain, *args, **kwargs)
        if self.lightning_module is not None and self.lightning_module.automatic_optimization:
            self._observe()
        return loss

    @override
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        step = partial(super().optimizer_step, optimizer, closure, model, **kwargs)
        return step() if self._engine is None else self._engine.optimizer_step(step)

    def _observe(self) -> None:
        """Once per iteration, before callbacks may write a checkpoint: tell the balance what it took."""
        engine, balance = self._engine, self.balance
        batch = None if engine is None else engine.take_batch()
        if engine is not None and balance is not None and batch is not None and batch is not self._observed:
            self._observed = batch  # an optimizer with a closure runs several times over it
            balance.observe(batch, engine.take_seconds())

    @override
    def on_validation_start(self) -> None:
        if self.balance is not None:
            self.balance.pause()

    @override
    def on_train_end(self) -> None:
        self._stop()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)  # first of all, the other nodes hear of it
        self._stop()

    @override
    def teardown(self) -> None:
        self._stop()
        self._sampling = None
        super().teardown()

    def _close_engine(self) -> list[str]:
        engine, self._engine = self._engine, None
        if engine is None:
            return []
        self._random_states = engine.state_dict()
        return engine.close()

    def _stop(self) -> None:
        """End all threads."""
        self._observed = None
        hanging = [] if self.loader is None else self.loader.close()
        hanging += self._close_engine()
        if self._hooks is not None:
            self._hooks.remove()
        if hanging:
            rank_zero_warn(f"hyscale could not end {hanging}: they hang in a call that Python cannot interrupt")

    # -- checkpoints: what only this strategy needs lies under a key that others ignore

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.balance is not None:
            random = self._random_states if self._engine is None else self._engine.state_dict()
            states = self.gather_objects((random, self.balance.state_dict()))
            order = None
            if self.loader is not None and self.loader.order_state is not None:
                order = (self.loader.order_state, torch.get_rng_state())
            checkpoint[_KEY] = {
                "random": [random for random, _ in states],
                "balance": [balance for _, balance in states],
                "order": order,
            }
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._restored = dict(checkpoint.get(_KEY, {}))
        return checkpoint

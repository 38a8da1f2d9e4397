"""Full-graph training on one device or several by tensor-data hybrid parallelism (NeutronAscend, section 5)."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning_fabric.utilities.seed import reset_seed
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.overrides.distributed import _sync_module_states
from pytorch_lightning.plugins import Precision
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor, nn
from torch_geometric.nn import norm as pyg
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_gnn.full_graph.batches import BatchCache, ShardedBatch
from lightning_gnn.graph.hybrid_plan import PlanSettings, divisors
from lightning_gnn.ops.dropout import drop_by_row
from lightning_gnn.ops.hashing import batch_key
from lightning_gnn.runtime.gradients import GradientMean
from lightning_gnn.runtime.losses import LossWeights, returned_loss, warning_of, weighs_otherwise
from lightning_gnn.runtime.shared_arrays import share_equal_arrays
from lightning_gnn.runtime.weighted_ddp import WeightedDDPStrategy

_STAGES = {"train": 0, "val": 1, "test": 2, "predict": 3}


class AscendHybridParallelStrategy(WeightedDDPStrategy):
    """Trains on full graphs: ``Trainer(accelerator="cpu" | "cuda" | "npu", devices=N, strategy="ascend_hybrid")``.

    The batches are those of :class:`~lightning_gnn.full_graph.FullGraphDataModule`, and the model is built from the
    layers of :mod:`lightning_gnn.nn`; it does not change.

    With one device, the hybrid plan runs inside the aggregation: its cores form ``num_groups`` groups.

    With N devices, each rank owns some rows of every tensor of nodes, evenly of each split, and sees them alone; an
    aggregation exchanges rows and feature slices (:class:`RowShard`), in ``num_groups`` groups of ranks. Then

    - the loss must be a mean over the nodes of the split's mask (over all nodes without a mask) plus, if need be, terms
      that do not depend on nodes. Gradients are those of the mean over all ranks' nodes, before clipping and steps.
      For another loss, ``training_step`` returns ``{"loss": loss, "weight": weight}`` on every rank: what the loss was
      divided by (labels that count, the sum of their class weights), or ``"sum"`` where it was not divided. Manual
      optimisation knows means over nodes only;
    - ``self.log`` of a mean in a step gives the mean over all ranks' nodes of that step's split, other reductions run
      over all ranks; metrics of torchmetrics synchronise themselves;
    - ``predict_step``'s tensors of rows come back on every rank, for all nodes in their order;
    - normalisation over nodes is refused (batch normalisation works as ``sync_batchnorm=True`` on GPUs);
    - the loss of a rank ends the others, with a message that names it.

    In all steps, dropout is drawn by row and column (:class:`~lightning_gnn.ops.dropout.drop_by_row`), so that any
    number of devices gives the same result, to rounding. Checkpoints are those of one process.

    Args:
        num_groups: M, which divides the number of workers (cores of the one device, or ranks), or ``"auto"``.
        cores_per_device: Cores that aggregate on each device; None takes torch's threads.
        bandwidth_ratio: How many times faster the cores' shared cache is than memory.
        process_group_backend: By default gloo on CPUs, nccl on CUDA, hccl on NPUs.
        timeout: How long a rank may give no sign of life, and a collective may take; a number means seconds. It counts
            from when all ranks have met, for which they have half an hour, or ``timeout`` if that is longer: imports
            may take their time.
        memory_limit: Bytes that a rank may use for its part of the graph, None for no limit, or ``"auto"`` for what is
            free.
        accelerator: What the devices are; None takes the trainer's.
        parallel_devices: This node's devices; None takes the trainer's.
        cluster_environment: How ranks find one another; None takes the trainer's.
        checkpoint_io: How checkpoints are written and read; None takes Lightning's.
        precision_plugin: Number formats of the steps; None takes the trainer's.
        start_method: How the other processes of this node are started: ``"popen"`` runs the script again, or, from a
            notebook, fresh processes that get what the notebook has; ``"fork"`` is refused with several devices.

    Raises:
        ValueError: An argument is out of range. Later: M does not divide the number of ranks; features are narrower
            than a given M; a split has fewer nodes than there are ranks; ranks have different graphs; the graph does
            not fit (says how many ranks would do); several processes by fork; a normalisation over nodes.
        TypeError: A batch is not a full graph.

    Examples:
        >>> import torch
        >>> from pytorch_lightning import Trainer
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn import AscendHybridParallelStrategy, FullGraphDataModule
        >>> from lightning_gnn.nn import GCN, NodeClassifier
        >>> y = torch.arange(40) % 2
        >>> ring = torch.arange(40)
        >>> edge_index = torch.stack([ring, (ring + 2) % 40])  # neighbours are of one class
        >>> x = torch.nn.functional.one_hot(y).float()
        >>> first = ring < 20
        >>> data = Data(x, edge_index, y=y, train_mask=first, val_mask=~first)
        >>> trainer = Trainer(
        ...     accelerator="cpu",
        ...     strategy=AscendHybridParallelStrategy(num_groups=1),
        ...     max_epochs=10,
        ...     logger=False,
        ...     enable_checkpointing=False,
        ...     enable_progress_bar=False,
        ...     enable_model_summary=False,
        ... )
        >>> _ = torch.manual_seed(0)
        >>> model = GCN(in_channels=2, hidden_channels=8, num_layers=2, out_channels=2)
        >>> trainer.fit(NodeClassifier(model, num_classes=2, lr=0.1), FullGraphDataModule(data))
        >>> trainer.callback_metrics["val_acc"].item()
        1.0
    """

    strategy_name = "ascend_hybrid"
    brought_home = ("_seed",)

    def __init__(
        self,
        num_groups: int | Literal["auto"] = "auto",
        cores_per_device: int | None = None,
        bandwidth_ratio: float = 20,
        process_group_backend: str | None = None,
        timeout: timedelta | float = timedelta(minutes=10),
        memory_limit: int | Literal["auto"] | None = "auto",
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, but is {timeout.total_seconds():g} seconds")
        if isinstance(memory_limit, str) and memory_limit != "auto":
            raise ValueError(f"memory_limit must be bytes, None or 'auto', but is {memory_limit!r}")
        self.settings = PlanSettings(cores_per_device, num_groups, bandwidth_ratio)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.memory_limit = memory_limit
        self._seed: int | None = None
        self._cache: BatchCache | None = None
        self._batch: ShardedBatch | None = None
        self._dropout: drop_by_row | None = None
        self._split = "train"
        self._loss_weights: LossWeights | None = None
        self._gradients: GradientMean | None = None
        self._weight: float | None = None
        self._looked = False
        self._num_steps = 0

    # Processes.

    @override
    def setup_distributed(self) -> None:
        """Connect the ranks; one alone needs no process group."""
        self.set_world_ranks()
        if self._alone:
            return
        reset_seed()
        num_groups = self.settings.num_groups
        if num_groups != "auto" and self.world_size % num_groups:
            raise ValueError(
                f"num_groups={num_groups} does not divide the {self.world_size} devices; use 'auto' or one of "
                f"{', '.join(map(str, divisors(self.world_size)))}"
            )
        assert self._timeout is not None
        self._join(self._timeout.total_seconds())

    @override
    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is None and self.root_device.type == "npu":
            return "hccl"
        return super()._get_process_group_backend()

    @override
    def teardown(self) -> None:
        """Free the shards, and leave the other ranks when all are through."""
        if self.lightning_module is not None:
            log_locally(self.lightning_module)
        self._cache = self._batch = None
        super().teardown()

    # The model.

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Move the model to the device, make it the same on all ranks, and set up the optimizers."""
        super().setup(trainer)
        if not self._alone:
            own = set(map(id, self._module.parameters()))
            for parameter in self._trained():
                if id(parameter) not in own:
                    dist.broadcast(parameter.data, 0)
            if trainer.state.fn == "fit":
                refuse_norms_over_nodes(self._module)
            log_globally(self._module, self._share, self.world_size)
            self._loss_weights, self._looked = LossWeights(self.root_device), False
            self._num_steps = 0
            self._gradients = GradientMean(self.world_size)
        if self._seed is None:
            # Masks of one seed on all ranks, also where nobody called seed_everything.
            self._seed = self.broadcast(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())))

    @override
    def configure_ddp(self) -> None:
        """Make parameters and buffers those of rank 0."""
        _sync_module_states(self._module)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, with the seed of the dropout masks; it loads without this strategy."""
        checkpoint = {**checkpoint, self.strategy_name: {"seed": self._seed}}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, whatever strategy wrote it."""
        checkpoint = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        self._seed = checkpoint.get(self.strategy_name, {}).get("seed", self._seed)
        return checkpoint

    # Batches.

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return this rank's part of a full graph, on its device; the same batch is cut and moved once."""
        return super().batch_to_device(self._prepared.prepare(batch), device, dataloader_idx)

    @property
    def _prepared(self) -> BatchCache:
        if self._cache is None:
            self._cache = BatchCache(
                self.settings,
                self.global_rank,
                self.world_size,
                self.num_processes,
                self.root_device,
                self.memory_limit,
            )
        return self._cache

    # Steps.

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let the ranks of one machine use one copy of what the first step has derived from the graph."""
        self._num_steps += 1
        datamodule = getattr(self._module.trainer, "datamodule", None)
        if self._num_steps == 2 and self.world_size > 1 and getattr(datamodule, "share_memory", False):
            share_equal_arrays(self._prepared.large_arrays())

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step on this rank's rows."""
        number = self._module.trainer.fit_loop.epoch_loop.total_batch_idx
        output = self._run_step("train", super().training_step, args, kwargs, number)
        self._weight = None
        if self._loss_weights is not None and self._module.automatic_optimization:
            self._weight = self._loss_weights.part(output)
            if self._weight is None:
                self._look(returned_loss(output))
        return output

    def _look(self, loss: Tensor | None) -> None:
        """Warn, once, of a loss that needs a weight. All ranks come here together."""
        if not self._looked:
            self._looked = True
            found: list[str | None] = [None] * self.world_size
            dist.all_gather_object(found, None if loss is None else weighs_otherwise(loss, self._share()[0]))
            if (why := next(filter(None, found), None)) is not None:
                rank_zero_warn(warning_of(why, "ascend_hybrid's ranks", "nodes"))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step on this rank's rows."""
        return self._run_step("val", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step on this rank's rows."""
        return self._run_step("test", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step on this rank's rows, and return the rows of all ranks."""
        predicted = self._run_step("predict", super().predict_step, args, kwargs)
        return predicted if self._batch is None else apply_to_collection(predicted, Tensor, self._batch.gather)

    def _run_step(
        self, split: str, step: Callable[..., Any], args: Any, kwargs: dict[str, Any], number: int | None = None
    ) -> Any:
        if self._lazy:
            with self._step(split, args, number):
                self.initialize_lazy(step, *args, **kwargs)
        with self._step(split, args, number):
            return step(*args, **kwargs)

    @contextmanager
    def _step(self, split: str, args: tuple[Any, ...], number: int | None = None) -> Iterator[None]:
        """Draw dropout by row, and know whose share of which split is at work."""
        self._batch = next((batch for batch in map(self._prepared.sharded, args) if batch is not None), None)
        self._split = split
        assert self._seed is not None
        if number is None:
            number = next((argument for argument in args if isinstance(argument, int)), 0)  # batch_idx
        key = batch_key(self._seed, loader=_STAGES[split], batch=number)
        self._dropout = drop_by_row(key, None if self._batch is None else self._batch.graph.rows)
        with self._dropout:
            yield

    def _share(self) -> tuple[int, int]:
        """Return how many nodes of the current split this rank has, and how many there are."""
        return (1, 1) if self._batch is None else self._batch.share(self._split)

    # Gradients and numbers.

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute gradients of the mean over all ranks' nodes, or of what the weights of ``training_step`` make."""
        automatic = self._module.automatic_optimization
        # Gradient checkpointing runs parts of the step again, with the masks that they had; by hand, it is not over.
        with self._dropout if automatic and self._dropout is not None else nullcontext():
            return self._backward(closure_loss, optimizer, *args, **kwargs)

    def _backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self._alone:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if not self._module.automatic_optimization:
            self._look(closure_loss)
        # The mean over ranks of N * n_r / n times a rank's mean is the mean over nodes.
        loss = closure_loss * (self._part_of_loss() * self.world_size)
        loss = self.precision_plugin.pre_backward(loss, self._module)
        self.precision_plugin.backward(loss, self._module, optimizer, *args, **kwargs)
        if self.sync_gradients:
            assert self._gradients is not None
            self._gradients.take(self._trained())
        return self.precision_plugin.post_backward(loss, self._module)

    def _part_of_loss(self) -> float:
        """Return by what this rank's loss is multiplied in the sum of all ranks' losses."""
        here, everywhere = self._share()
        return here / everywhere if self._weight is None else self._weight

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step; an optimizer that reads the loss, as a line search does, gets that of all ranks."""
        if not self._alone and _reads_the_loss(optimizer):
            closure = partial(self._of_all_ranks, closure)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _of_all_ranks(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        if loss is None:
            return None
        loss = torch.as_tensor(loss, device=self.root_device).detach() * self._part_of_loss()
        dist.all_reduce(loss)
        return loss


def _reads_the_loss(optimizer: Any) -> bool:
    """Say whether an optimizer may decide by the loss; those of torch, one aside, hand it on as it is."""
    kind = type(optimizer)
    return issubclass(kind, torch.optim.LBFGS) or not kind.__module__.startswith("torch.optim")


_STEPS = ("training_step", "validation_step", "test_step")


def log_globally(module: pl.LightningModule, share: Callable[[], tuple[int, int]], num_ranks: int) -> None:
    """Make a module's ``log`` exact over all ranks, until :func:`log_locally`.

    Inside the three steps, a mean becomes the mean over the split's nodes of all ranks; a sum, maximum or minimum runs
    over all ranks. Metrics of torchmetrics are left to their own synchronisation, and so are other hooks.
    """
    original = type(module).log.__get__(module)
    signature = inspect.signature(original)

    def log(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        value, reduce = given["value"], given.get("reduce_fx", "mean")
        reduce = getattr(reduce, "__name__", reduce)
        known = reduce in ("mean", "avg", "sum", "max", "min")
        if isinstance(value, Metric | MetricCollection) or module._current_fx_name not in _STEPS or not known:
            original(**given)
            return
        if given.get("rank_zero_only"):
            raise ValueError(
                f"log({given['name']!r}, rank_zero_only=True): under ascend_hybrid each rank has some of the rows, "
                "so that all must log; leave rank_zero_only out"
            )
        if reduce in ("mean", "avg"):
            here, everywhere = share()
            value = _float(value) * (here / everywhere * num_ranks)
            given["batch_size"] = everywhere
        original(**{**given, "value": value, "sync_dist": True})

    module.__dict__["log"] = log


def log_locally(module: pl.LightningModule) -> None:
    """Give a module its own ``log`` back."""
    module.__dict__.pop("log", None)


def _float(value: Any) -> Tensor:
    number = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.get_default_dtype())
    return number if number.is_floating_point() else number.to(torch.get_default_dtype())


_OVER_NODES = (
    nn.modules.batchnorm._BatchNorm,
    pyg.BatchNorm,
    pyg.HeteroBatchNorm,
    pyg.InstanceNorm,
    pyg.GraphNorm,
    pyg.GraphSizeNorm,
    pyg.PairNorm,
    pyg.MeanSubtractionNorm,
    pyg.DiffGroupNorm,
)


def refuse_norms_over_nodes(model: nn.Module) -> None:
    """Refuse layers whose statistics run over all nodes: over a rank's rows they would be other ones.

    ``SyncBatchNorm`` is fine: its statistics run over the ranks.
    """
    found = [
        f"{name} ({type(layer).__name__})"
        for name, layer in model.named_modules()
        if (isinstance(layer, _OVER_NODES) and not _synchronised(layer))
        or (isinstance(layer, pyg.LayerNorm) and layer.mode == "graph")
    ]
    if found:
        raise ValueError(
            f"{', '.join(found)} normalises over all nodes, of which each rank has a part: the results would depend on "
            "the number of devices; use LayerNorm(mode='node') or another norm over features, Trainer(sync_batchnorm="
            "True) for batch normalisation on GPUs, or one device"
        )


def _synchronised(layer: nn.Module) -> bool:
    """Say whether this is a ``SyncBatchNorm``, or PyG's wrapper of one."""
    return isinstance(layer, nn.SyncBatchNorm) or isinstance(getattr(layer, "module", None), nn.SyncBatchNorm)

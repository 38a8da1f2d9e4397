"""Full-graph training on one device or several by tensor-data hybrid parallelism (NeutronAscend, section 5)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.seed import reset_seed
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import Unpack, override

from lightning_gnn.compressed.hybrid_plan import PlanSettings, divisors
from lightning_gnn.distributed.monitored_ranks import RankOptions
from lightning_gnn.distributed.step_sync import BatchWeight
from lightning_gnn.distributed.weighted_ddp import WeightedDDPStrategy
from lightning_gnn.full_graph.batches import BatchCache, ShardedBatch
from lightning_gnn.full_graph.checks import refuse_norms_over_nodes
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.ops.dropout import drop_by_row
from lightning_gnn.ops.hashing import batch_key
from lightning_gnn.runtime.shared_arrays import share_equal_arrays

log = logging.getLogger(__name__)

_SPLITS = {"training_step": "train", "validation_step": "val", "test_step": "test", "predict_step": "predict"}
_LOADERS = {split: number for number, split in enumerate(_SPLITS.values())}
"""Numbers of the loaders in the keys of dropout."""


class AscendHybridParallelStrategy(WeightedDDPStrategy):
    """Trains on full graphs: ``Trainer(accelerator="cpu" | "cuda" | "npu", devices=N, strategy="ascend_hybrid")``.

    The batches are those of :class:`~lightning_gnn.full_graph.FullGraphDataModule`, and the model is built from the
    layers of :mod:`lightning_gnn.nn`. With one device, the hybrid plan runs inside the aggregation: its cores form
    ``num_groups`` groups. With N devices, each rank owns some rows of every tensor of nodes, evenly of each split, and
    sees them alone; an aggregation exchanges rows and feature slices, in ``num_groups`` groups of ranks. Then

    - the loss must be a mean over the nodes of the split's mask (over all nodes without a mask) plus, if need be, terms
      that do not depend on nodes; gradients are those of the mean over all ranks' nodes. For another loss,
      ``training_step`` returns ``{"loss": loss, "weight": weight}`` on every rank: what the loss was divided by (labels
      that count, the sum of their class weights), or ``"sum"``. Manual optimization knows means over nodes only;
    - ``self.log`` of a mean in a step gives the mean over all ranks' nodes of that step's split, other reductions run
      over all ranks; metrics of torchmetrics synchronize themselves;
    - ``predict_step``'s tensors of rows come back on every rank, for all nodes in their order;
    - normalization over nodes is refused (batch normalization works as ``sync_batchnorm=True`` on GPUs);
    - the loss of a rank ends the others, with a message that names it.

    In all steps, dropout is drawn by row and column (:class:`~lightning_gnn.ops.dropout.drop_by_row`), so that any
    number of devices gives the same result, to rounding. Checkpoints are those of one process.

    Args:
        num_groups: M, which divides the number of workers (cores of the one device, or ranks), or ``"auto"``.
        cores_per_device: Cores that aggregate on each device; None takes torch's threads.
        bandwidth_ratio: How many times faster the cores' shared cache is than memory.
        process_group_backend: By default gloo on CPUs, nccl on CUDA, hccl on NPUs.
        timeout: How long a rank may give no sign of life, and a collective may take, once all ranks have met; a number
            means seconds. For the meeting they have half an hour at least.
        memory_limit: Bytes that a rank may use for its part of the graph, None for no limit, or ``"auto"`` for what is
            free.
        **kwargs: Of Lightning's ``DDPStrategy``: ``checkpoint_io``, ``start_method`` (not ``"fork"``), and such.

    Raises:
        ValueError: An argument is out of range. Later: M does not divide the number of ranks; features are narrower
            than a given M; a split has fewer nodes than there are ranks; ranks have different graphs; the graph does
            not fit; several processes by fork; a normalization over nodes.
        TypeError: A batch is not a full graph.

    Examples:
        >>> import torch
        >>> from pytorch_lightning import Trainer
        >>> from torch_geometric.data import Data
        >>> from lightning_gnn import AscendHybridParallelStrategy, FullGraphDataModule
        >>> from lightning_gnn.nn import GCN, NodeClassifier
        >>> y = torch.arange(40) % 2
        >>> ring = torch.arange(40)
        >>> edge_index = torch.stack([ring, (ring + 2) % 40])  # neighbors are of one class
        >>> x = torch.nn.functional.one_hot(y).float()
        >>> first = ring < 20
        >>> data = Data(x, edge_index, y=y, train_mask=first, val_mask=~first)
        >>> trainer = Trainer(
        ...     accelerator="cpu", strategy=AscendHybridParallelStrategy(num_groups=1), max_epochs=10, logger=False,
        ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> _ = torch.manual_seed(0)
        >>> model = GCN(in_channels=2, hidden_channels=8, num_layers=2, out_channels=2)
        >>> trainer.fit(NodeClassifier(model, num_classes=2, lr=0.1), FullGraphDataModule(data))
        >>> trainer.callback_metrics["val_acc"].item()
        1.0
    """

    strategy_name = "ascend_hybrid"
    synced_attributes = ("_seed",)
    counts = "nodes"
    shards_graph = True

    def __init__(
        self,
        num_groups: int | Literal["auto"] = "auto",
        cores_per_device: int | None = None,
        bandwidth_ratio: float = 20,
        process_group_backend: str | None = None,
        timeout: timedelta | float = timedelta(minutes=10),
        memory_limit: int | Literal["auto"] | None = "auto",
        **kwargs: Unpack[RankOptions],
    ) -> None:
        # Validate the options that the base class does not know.
        timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, but is {timeout.total_seconds():g} seconds")
        if isinstance(memory_limit, str) and memory_limit != "auto":
            raise ValueError(f"memory_limit must be bytes, None or 'auto', but is {memory_limit!r}")
        # Settings of the plan are kept together, since each layer is planned with them.
        self.settings = PlanSettings(cores_per_device, num_groups, bandwidth_ratio)
        super().__init__(timeout, process_group_backend, **kwargs)
        # The seed, the shards and the present batch are set by the stages of the Trainer.
        self.memory_limit = memory_limit
        self._seed: int | None = None
        self._cache: BatchCache | None = None
        self._batch: ShardedBatch | None = None
        self._dropout: drop_by_row | None = None
        self._split = "train"
        self._num_steps = 0

    # -- processes

    @override
    def setup_distributed(self) -> None:
        """Connect the ranks; one alone needs no process group."""
        log.debug(f"{self.__class__.__name__}: creating the process group")
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
        self._connect(self._timeout.total_seconds())

    @override
    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is None and self.root_device.type == "npu":
            return "hccl"
        return super()._get_process_group_backend()

    # -- the model

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if not self._alone and trainer.state.fn == "fit":
            refuse_norms_over_nodes(self._module)
        self._num_steps = 0
        if self._seed is None:
            # Masks of one seed on all ranks, also without seed_everything.
            self._seed = self.broadcast(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        """Write a checkpoint, with the seed of the dropout masks; it loads without this strategy."""
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: saving a checkpoint")
        checkpoint = {**checkpoint, self.strategy_name: {"seed": self._seed}}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, whatever strategy wrote it."""
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: loading a checkpoint")
        checkpoint = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        self._seed = checkpoint.get(self.strategy_name, {}).get("seed", self._seed)
        return checkpoint

    # -- batches

    @override
    def batch_to_device(self, batch: object, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return this rank's part of a full graph, on its device; the same batch is cut and moved once."""
        return super().batch_to_device(self._prepared.prepare(batch), device, dataloader_idx)

    @property
    def _prepared(self) -> BatchCache:
        """The batches that were cut, and are kept for the next epochs."""
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

    # -- steps

    @override
    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Let the ranks of one machine use one copy of what the first step has derived from the graph."""
        super().on_train_batch_start(batch, batch_idx)
        self._num_steps += 1
        datamodule = getattr(self._module.trainer, "datamodule", None)
        shares = isinstance(datamodule, FullGraphDataModule) and datamodule.share_memory
        if self._num_steps == 2 and self.world_size > 1 and shares:
            share_equal_arrays(self._prepared.large_arrays())

    @override
    @contextmanager
    def batch_context(self, step: str, args: tuple[object, ...]) -> Iterator[None]:
        """Draw dropout by row, and know whose share of which split is at work."""
        self._batch = next((batch for batch in map(self._prepared.sharded, args) if batch is not None), None)
        self._split = _SPLITS[step]
        assert self._seed is not None
        # In training the graph comes again in each epoch as the batch of index 0, which must not draw the same masks.
        if step == "training_step":
            number = self._module.trainer.fit_loop.epoch_loop.total_batch_idx
        else:
            number = next((argument for argument in args if isinstance(argument, int)), 0)  # batch_idx
        key = batch_key(self._seed, loader=_LOADERS[self._split], batch=number)
        self._dropout = drop_by_row(key, None if self._batch is None else self._batch.graph.rows)
        with self._dropout:
            yield

    @override
    def user_code(self, name: str) -> AbstractContextManager[object]:
        """Draw in the backward pass, too: gradient checkpointing runs parts of the step again, with their masks."""
        by_hand = not self._module.automatic_optimization  # in which the step is not over
        return nullcontext() if name != "backward" or by_hand or self._dropout is None else self._dropout

    @override
    def batch_weight(self) -> BatchWeight:
        """Return how many nodes of the current split this rank has, and how many there are."""
        return BatchWeight(1, 1) if self._batch is None else BatchWeight(*self._batch.share(self._split))

    @override
    def predict_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Run the module's step on this rank's rows, and return the rows of all ranks."""
        predicted = super().predict_step(*args, **kwargs)
        return predicted if self._batch is None else apply_to_collection(predicted, Tensor, self._batch.gather)

    @override
    def teardown(self) -> None:
        """Free the shards, and leave the other ranks when all are through."""
        self._cache = self._batch = None
        super().teardown()

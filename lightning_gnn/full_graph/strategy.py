"""Full-graph training on one device or several by tensor-data hybrid parallelism (NeutronAscend, section 5)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import Unpack, override

from lightning_gnn.compressed.hybrid_plan import PlanSettings, divisors
from lightning_gnn.distributed.heartbeat import check_stall_timeout
from lightning_gnn.distributed.monitored_ranks import RankOptions
from lightning_gnn.distributed.step_sync import BatchWeight
from lightning_gnn.distributed.weighted_ddp import WeightedDDPStrategy
from lightning_gnn.full_graph.batches import BatchCache, ShardedBatch
from lightning_gnn.full_graph.checks import check_norms
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.ops.dropout import drop_by_row
from lightning_gnn.ops.hashing import batch_key
from lightning_gnn.runtime.lightning import STEP_OUTPUT, _StrategyRegistry, pl, reset_seed
from lightning_gnn.runtime.shared_arrays import share_equal_arrays

log = logging.getLogger(__name__)

_SPLITS = {"training_step": "train", "validation_step": "val", "test_step": "test", "predict_step": "predict"}
_LOADERS = {split: number for number, split in enumerate(_SPLITS.values())}
"""Loader numbers in the dropout keys."""


class AscendHybridParallelStrategy(WeightedDDPStrategy):
    """Trains on full graphs: ``Trainer(accelerator="cpu" | "cuda" | "npu", devices=N, strategy="ascend_hybrid")``.

    Use it with :class:`~lightning_gnn.full_graph.FullGraphDataModule` and a model built from the layers of
    :mod:`lightning_gnn.nn`. With one device, the hybrid plan runs inside the aggregation: its cores form ``num_groups``
    groups. With N devices, each rank owns some rows of every node tensor, evenly from each split, and sees only these.
    An aggregation exchanges rows and feature slices, in ``num_groups`` groups of ranks. Then

    - The loss must be a mean over the nodes of the split's mask (over all nodes without a mask), plus optional terms
      that do not depend on nodes. The gradients equal those of the mean over all ranks' nodes. For another loss,
      ``training_step`` returns ``{"loss": loss, "weight": weight}`` on every rank, where the weight is the loss's
      divisor (number of counted labels, sum of their class weights) or ``"sum"``. Manual optimization supports only
      means over nodes.
    - ``self.log`` of a mean in a step returns the mean over all ranks' nodes of the step's split. Other reductions run
      over all ranks; torchmetrics synchronize themselves.
    - Tensors of rows returned by ``predict_step`` are gathered on every rank, for all nodes in their order.
    - Labeled edges (link prediction) are divided among the ranks, and each rank receives the embeddings of the nodes
      that its edges need. This requires :class:`~lightning_gnn.nn.LinkPredictor`, or a module with
      ``gathers_endpoints = True`` that calls ``z = batch.gather_endpoints(z)`` before it indexes embeddings.
    - Normalization over nodes is refused (batch normalization works with ``sync_batchnorm=True`` on GPUs).
    - If a rank dies, the others abort with a message that names it.

    In all steps, dropout depends on row and column (:class:`~lightning_gnn.ops.dropout.drop_by_row`), so the result is
    the same for any number of devices, up to rounding. Checkpoints equal those of one process.

    Args:
        num_groups: M, a divisor of the number of workers (cores of the single device, or ranks), or ``"auto"``.
        cores_per_device: Cores that aggregate on each device; None uses torch's number of threads.
        bandwidth_ratio: Bandwidth of the cores' shared cache relative to memory.
        grouping: How ``num_groups="auto"`` chooses M: ``"balanced"`` by the estimated cycles of the kernels, or by the
            bytes exchanged between ranks; ``"paper"`` by algorithm 1, which always chooses M = 1.
        chunks: Chunks that an NPU multiplies: ``"balanced"`` by algorithm 2 with full chunks, or in the order of ids if
            that loads fewer rows; ``"paper"`` by algorithm 2 line by line. CPUs and GPUs use no chunks.
        process_group_backend: By default gloo on CPUs, nccl on CUDA, gloo and hccl on NPUs.
        timeout: Maximum duration of a collective; a number means seconds. The initial rendezvous may take at least half
            an hour.
        memory_limit: Bytes that a rank may use for its shard of the graph, None for no limit, or ``"auto"`` for the
            free memory.
        stall_timeout: Seconds after which the run is aborted because a rank sends no heartbeat, or computes in a step
            without exchanging rows; ``timeout`` if that is shorter. On GPUs and NPUs, which exchange asynchronously,
            the message may name a rank that waits for another one.
        **kwargs: Arguments of Lightning's ``DDPStrategy``, such as ``checkpoint_io`` and ``start_method`` (not
            ``"fork"``).

    Raises:
        ValueError: An argument is out of range. During setup or the first batch: M does not divide the number of ranks;
            features have fewer columns than M; a split has fewer nodes than ranks; the ranks' graphs differ; the graph
            does not fit; several processes are started by fork; a layer normalizes over nodes; the module
            cannot score labeled edges of a sharded graph, or these are fewer than the ranks.
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
        grouping: Literal["balanced", "paper"] = "balanced",
        chunks: Literal["balanced", "paper"] = "balanced",
        stall_timeout: float = 300.0,
        **kwargs: Unpack[RankOptions],
    ) -> None:
        # Validate the options that the base class does not validate.
        timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, but is {timeout.total_seconds():g} seconds")
        if isinstance(memory_limit, str) and memory_limit != "auto":
            raise ValueError(f"memory_limit must be bytes, None or 'auto', but is {memory_limit!r}")
        self.stall_timeout = min(check_stall_timeout(stall_timeout), timeout.total_seconds())
        # Every layer is planned with these settings.
        self.settings = PlanSettings(cores_per_device, num_groups, bandwidth_ratio, grouping, chunks)
        super().__init__(timeout, process_group_backend, **kwargs)
        # The Trainer's stages set the seed, the shards and the current batch.
        self.memory_limit = memory_limit
        self._seed: int | None = None
        self._cache: BatchCache | None = None
        self._batch: ShardedBatch | None = None
        self._dropout: drop_by_row | None = None
        self._split = "train"
        self._num_steps = 0

    # -- processes

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register ``strategy="ascend_hybrid"``, and a name for each start method, as Lightning does for ``"ddp"``."""
        for suffix, method in {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "spawn"}.items():
            strategy_registry.register(f"{cls.strategy_name}{suffix}", cls, start_method=method)

    @override
    def setup_distributed(self) -> None:
        """Connect the ranks; a single rank needs no process group."""
        log.debug(f"{self.__class__.__name__}: creating the process group")
        self.set_world_ranks()
        if self._is_single_rank:
            return
        reset_seed()
        num_groups = self.settings.num_groups
        if num_groups != "auto" and self.world_size % num_groups:
            raise ValueError(
                f"num_groups={num_groups} does not divide the {self.world_size} devices; use 'auto' or one of "
                f"{', '.join(map(str, divisors(self.world_size)))}"
            )
        assert self._timeout is not None
        self._connect(self.stall_timeout)

    # -- the model

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if not self._is_single_rank and trainer.state.fn == "fit":
            check_norms(self._module)
        self._num_steps = 0
        if self._seed is None:
            # The same dropout seed on all ranks, also without seed_everything.
            self._seed = self.broadcast(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        """Write a checkpoint with the seed of the dropout masks; other strategies can load it, too."""
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: saving a checkpoint")
        checkpoint = {**checkpoint, self.strategy_name: {"seed": self._seed}}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint written by any strategy."""
        log.debug(f"{self.__class__.__name__}, {self.rank_name}: loading a checkpoint")
        checkpoint = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        self._seed = checkpoint.get(self.strategy_name, {}).get("seed", self._seed)
        return checkpoint

    # -- batches

    @override
    def batch_to_device(self, batch: object, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return this rank's shard of a full graph on its device; each batch is sharded and moved once."""
        prepared = self._batch_cache.prepare(batch)
        if "gather_endpoints" in prepared and not getattr(self._module, "gathers_endpoints", False):
            raise ValueError(
                f"labeled edges name nodes of the whole graph, which is sharded across {self.world_size} ranks, but "
                f"{type(self._module).__name__} does not gather the embeddings of other ranks: use LinkPredictor; set "
                "gathers_endpoints = True in a module that calls z = batch.gather_endpoints(z); use one device; or "
                "delete edge_label_index"
            )
        return super().batch_to_device(prepared, device, dataloader_idx)

    @property
    def _batch_cache(self) -> BatchCache:
        """Cache of the sharded batches, reused in later epochs."""
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
        """After the first step, share its cached graph arrays between the ranks of one machine."""
        super().on_train_batch_start(batch, batch_idx)
        self._num_steps += 1
        datamodule = getattr(self._module.trainer, "datamodule", None)
        shares_memory = isinstance(datamodule, FullGraphDataModule) and datamodule.share_memory
        if self._num_steps == 2 and self.world_size > 1 and shares_memory:
            share_equal_arrays(self._batch_cache.large_arrays())

    @override
    @contextmanager
    def batch_context(self, step: str, args: tuple[object, ...]) -> Iterator[None]:
        """Set the current batch and split, and make dropout depend on the row."""
        self._batch = next((batch for batch in map(self._batch_cache.find_sharded, args) if batch is not None), None)
        self._split = _SPLITS[step]
        assert self._seed is not None
        # In training, every epoch has a single batch with index 0, so use a global index for new dropout masks.
        if step == "training_step":
            number = self._module.trainer.fit_loop.epoch_loop.total_batch_idx
        else:
            number = next((argument for argument in args if isinstance(argument, int)), 0)  # batch_idx
        key = batch_key(self._seed, loader=_LOADERS[self._split], batch=number)
        self._dropout = drop_by_row(key, None if self._batch is None else self._batch.graph.rows)
        with self._dropout:
            yield

    @override
    @contextmanager
    def user_code(self, name: str) -> Iterator[None]:
        """Monitor module code by heartbeats, and use the dropout masks in the backward pass, too.

        Gradient checkpointing recomputes parts of the step there.
        """
        # With manual optimization, backward runs inside the step's context.
        dropout = self._dropout if name == "backward" and self._module.automatic_optimization else None
        with self.working(name), nullcontext() if dropout is None else dropout:
            yield

    @override
    def batch_weight(self) -> BatchWeight:
        """Return the local and total number of nodes of the current split."""
        return BatchWeight(1, 1) if self._batch is None else BatchWeight(*self._batch.share(self._split))

    @override
    def predict_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        """Run the step on this rank's rows, and return all ranks' rows. All ranks must call this."""
        predicted = super().predict_step(*args, **kwargs)
        return predicted if self._batch is None else apply_to_collection(predicted, Tensor, self._batch.gather)

    @override
    def teardown(self) -> None:
        """Free the shards, and leave the process group once all ranks have finished."""
        self._cache = self._batch = None
        super().teardown()

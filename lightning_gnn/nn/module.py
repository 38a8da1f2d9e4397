"""Base LightningModule of all tasks: a PyG model, its optimizer, and the forward pass for any batch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType, NodeType
from torchmetrics import Metric

from lightning_gnn.nn.conv import unfused_layers
from lightning_gnn.nn.conv.backends import has_fused_layers
from lightning_gnn.nn.embeddings import TypeEmbeddings
from lightning_gnn.nn.metrics import WeightedMean
from lightning_gnn.nn.models import num_layers
from lightning_gnn.nn.optimizers import SplitOptimizer, densify_gradients
from lightning_gnn.nn.run_model import check_graph, run_model
from lightning_gnn.nn.sampled_edges import moved
from lightning_gnn.runtime.lightning import check_script, is_overridden, pl, rank_zero_info, rank_zero_warn
from lightning_gnn.runtime.precision import convert_batches


class GNNModule(pl.LightningModule):
    """Base class of all tasks: a PyG model, its optimizer, and the forward pass for any batch.

    Args:
        model: Maps ``x`` ``[N, F]`` and ``edge_index`` ``[2, E]`` to one row per node. Any PyG model is supported.
        lr: Learning rate of Adam, for ``optimizer=None``.
        weight_decay: Weight decay of Adam, for ``optimizer=None``.
        optimizer: Takes the parameters and returns an optimizer, e.g. ``functools.partial(torch.optim.SGD, lr=0.1)``.
        scheduler: Takes the optimizer and returns a scheduler (one step per epoch; a plateau scheduler watches
            ``val_loss``) or Lightning's ``lr_scheduler`` dictionary.
        embeddings: Trainable embeddings for node types without features.

    Raises:
        TypeError, ValueError: ``model`` is not a module, ``embeddings`` not ``TypeEmbeddings``, or ``lr`` not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., Any] | None = None,
        embeddings: TypeEmbeddings | None = None,
    ) -> None:
        check_script()
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(embeddings, (TypeEmbeddings, type(None))):
            raise TypeError(f"embeddings must be TypeEmbeddings, got {type(embeddings).__name__}")
        if not lr > 0:
            raise ValueError(f"lr must be positive, got {lr}")
        self.model = model
        self.embeddings = embeddings
        self.lr = lr
        self.weight_decay = weight_decay
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._checked: set[str] = set()
        self.val_loss, self.test_loss = WeightedMean(), WeightedMean()

    def forward(self, batch: Data | HeteroData) -> Any:
        """Return the model's outputs for the batch's first nodes, seeds first; by node type for a heterogeneous graph.

        Raises:
            TypeError, ValueError: As :func:`~lightning_gnn.nn.run_model`, which states what the model is given.
        """
        # A runner selects the edges of each layer itself.
        if isinstance(batch, Data | HeteroData) and getattr(batch, "runner", None) is None:
            self._check_hops(batch)
            self._log_unfused(batch)
        return run_model(self.model, batch, self.embeddings)

    def _check_hops(self, batch: Data | HeteroData) -> None:
        """Warn once if the number of hops of mini-batches differs from the number of layers."""
        if "hops" in self._checked:
            return
        self._checked.add("hops")
        hops, layers = _num_hops(batch), num_layers(self.model)
        if hops is None or layers is None or hops == layers:
            return
        effect = (
            "nodes of the last hop get no messages, so the seeds' outputs lack information from farther nodes"
            if hops < layers
            else "nodes sampled beyond the layers have no effect"
        )
        rank_zero_warn(
            f"the model has {layers} layers, but its mini-batches have {hops} "
            f"hop{'s' if hops != 1 else ''}: {effect}; give num_neighbors one fanout per layer"
        )

    def _log_unfused(self, batch: Data | HeteroData) -> None:
        """Log once which layers are not fused on mini-batches, and why, on devices that can."""
        if "fused" in self._checked or not self.training or self._trainer is None:
            return
        self._checked.add("fused")
        found = [store.get("edge_index") for store in batch.edge_stores]
        devices = {edges.device for edges in found if isinstance(edges, Tensor)}
        if _num_hops(batch) is None or not devices:
            return
        if all(map(has_fused_layers, devices)) and (reasons := unfused_layers(self.model)):
            which = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            rank_zero_info(f"Layers that run as several PyG operators, slower than one fused operator: {which}")

    def setup(self, stage: str) -> None:
        """Make the trainer convert PyG batches to its precision, like tensors."""
        convert_batches(self.trainer)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GNNModule":
        """Move or convert the module; metrics stay in 32 bits, since a sum of ones in bfloat16 ends at 256."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for part in self.modules():
            if isinstance(part, Metric):
                part._apply(_widen)
        return self

    def _call_batch_hook(self, hook_name: str, *args: Any) -> Any:
        """Move a batch; check that its edges are as sampled before the move, which avoids a device synchronization."""
        call = partial(super()._call_batch_hook, hook_name)
        owners = (self, getattr(self._trainer, "datamodule", None))
        is_copy = hook_name == "transfer_batch_to_device" and torch.device(args[1]).type != "cpu"
        if not is_copy or any(is_overridden(hook_name, owner) for owner in owners):
            return call(*args)
        return moved(args[0], lambda batch: call(batch, *args[1:]))

    def configure_optimizers(self) -> Any:
        """Return Adam or the user's optimizer, with the scheduler; includes the optimizer of sparse embeddings.

        Raises:
            ValueError: The model has uninitialized parameters (``in_channels=-1``).
        """
        for name, parameter in self.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise ValueError(f"{name} is not initialized: set in_channels, or run the model on one batch first")
        tables = [] if self.embeddings is None or not self.embeddings.sparse else list(self.embeddings.parameters())
        apart = {id(table) for table in tables}
        dense = [parameter for parameter in self.parameters() if id(parameter) not in apart]
        if self._optimizer is None:
            optimizer: torch.optim.Optimizer = torch.optim.Adam(dense, lr=self.lr, weight_decay=self.weight_decay)
        else:
            optimizer = self._optimizer(dense)
        if self.embeddings is not None and tables:
            sparse = self.embeddings.optimizer or partial(torch.optim.SparseAdam, lr=self.lr)
            optimizer = SplitOptimizer(optimizer, sparse(tables))
        if self._scheduler is None:
            return optimizer
        scheduler = self._scheduler(optimizer)
        if not isinstance(scheduler, dict):
            scheduler = {"scheduler": scheduler, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients like Lightning; sparse gradients by their values."""
        clipped = densify_gradients(optimizer) if gradient_clip_val else optimizer
        super().configure_gradient_clipping(clipped, gradient_clip_val, gradient_clip_algorithm)

    def _check_types(
        self, batch: Data | HeteroData, target: NodeType | EdgeType | None, names: Sequence[NodeType]
    ) -> None:
        """Raise an error unless the batch is a graph with the node types of the target, or without types and target."""
        check_graph(batch)
        if isinstance(batch, HeteroData) == (target is None):
            raise ValueError(
                f"the batch has the node types {', '.join(batch.node_types)}: give {type(self).__name__}(target=…)"
                if isinstance(batch, HeteroData)
                else f"target={target!r} needs heterogeneous batches, as from a DataModule with a HeteroData"
            )
        for name in names:
            if name not in batch.node_types:
                raise ValueError(f"the batch has no node type {name!r}, only {', '.join(batch.node_types)}")

    def _must_check(self, stage: str, values: Tensor) -> bool:
        """Return whether to check ``values``: always on the CPU, else at a stage's first batch (a device must sync)."""
        must = stage not in self._checked or values.device.type == "cpu"
        self._checked.add(stage)
        return must

    def _log_loss(self, stage: str, losses: Tensor, weights: Tensor | None = None) -> Tensor:
        """Log ``losses`` ``[n]`` (already multiplied by ``weights``, if any), and return their mean."""
        loss, size = losses.mean() if weights is None else losses.sum() / weights.sum(), losses.size(0)
        if stage == "train":
            self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=size)
            return loss
        # A metric also weights by size across processes; Lightning's own mean truncates the sizes on gloo.
        mean: Metric = getattr(self, f"{stage}_loss")
        mean.update(losses.detach(), *(() if weights is None else (weights,)))
        self.log(f"{stage}_loss", mean, on_step=False, on_epoch=True, prog_bar=stage == "val", batch_size=size)
        return loss


def _widen(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _num_hops(batch: Data | HeteroData) -> int | None:
    """Return the number of sampled hops, or None for a whole graph."""
    if isinstance(batch, HeteroData):
        by_type = batch.collect("num_sampled_edges", True)
        return max((len(numbers) for numbers in by_type.values()), default=None)
    hops = batch.get("num_sampled_edges")
    return len(hops) if isinstance(hops, (list, tuple)) else None

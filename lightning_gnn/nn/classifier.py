"""Node classification as a LightningModule, on neighbour-sampled mini-batches and on full graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import NodeType
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.nn.conv import check_takes_graph, is_graph, unfused_layers
from lightning_gnn.nn.conv.fused import FUSED_ON
from lightning_gnn.nn.inference import infer
from lightning_gnn.nn.models import num_layers, trims_exactly


class GNNModule(pl.LightningModule):
    """A PyG model, its optimizer, and the forward pass over any batch: what all tasks share.

    Args:
        model: Maps ``x`` ``[N, F]`` and ``edge_index`` ``[2, E]`` to one row per node. Any PyG model will do.
        lr: Learning rate of Adam, for ``optimizer=None``.
        weight_decay: Weight decay of Adam, for ``optimizer=None``.
        optimizer: Takes the parameters and returns an optimizer, e.g. ``functools.partial(torch.optim.SGD, lr=0.1)``.
        scheduler: Takes the optimizer and returns a scheduler (one step per epoch; a plateau scheduler watches
            ``val_loss``) or Lightning's ``lr_scheduler`` dictionary.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``lr`` or ``weight_decay`` is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not lr > 0:
            raise ValueError(f"lr must be positive, got {lr}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, got {weight_decay}")
        self.model = model
        self.lr = lr
        self.weight_decay = weight_decay
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._forward_arguments = frozenset(inspect.signature(getattr(model, "_orig_mod", model).forward).parameters)
        self._checked: set[str] = set()
        # "disable" hands a NaN on to EarlyStopping and the user, where the default drops it (and looks for it, which
        # stalls a device). torchmetrics 1.9 then ignores weights, so update it with a loss per node.
        self.val_loss = MeanMetric(nan_strategy="disable")
        self.test_loss = MeanMetric(nan_strategy="disable")

    def forward(self, batch: Data | HeteroData) -> Any:
        """Return the model's rows for the batch's first nodes, seeds first; of a graph with types, those of each type.

        The batch's ``edge_weight`` and ``edge_attr`` are passed on to models that take them, and so are the numbers of
        sampled nodes and edges per hop when trimming by them cannot change the seeds' rows. In evaluation, a whole
        graph with the attribute ``inference`` is run by :func:`~lightning_gnn.nn.infer`. ``x_aggregated``, if there is
        any, replaces the aggregation of the first layer. A warning tells, once, where mini-batches have another number
        of hops than the model has layers. Features of 16 bits are widened for a model of float32, except under
        autocast.

        Raises:
            TypeError: the batch holds a compressed graph, and the model has layers that need an ``edge_index`` tensor;
                ``x`` is of a dtype that the model cannot multiply by its weights.
            ValueError: the batch has no ``x`` or no ``edge_index``.
        """
        if isinstance(batch, HeteroData):
            return self._forward_types(batch)
        for name in ("x", "edge_index"):
            if batch.get(name) is None:
                raise ValueError(f"the batch has no {name!r}, only {sorted(batch.keys())}")
        self._compare_hops(batch)
        x = self._widened(batch.x)
        self._tell_unfused(batch)
        extra: dict[str, Any] = {}
        for name in ("edge_weight", "edge_attr"):
            takes = name in self._forward_arguments and getattr(self.model, f"supports_{name}", True)
            if takes and batch.get(name) is not None:
                extra[name] = batch[name]
        if batch.get("x_aggregated") is not None:
            if "x_aggregated" not in self._forward_arguments:
                raise ValueError(
                    f"the batch has x_aggregated, which {type(self.model).__name__}.forward does not take; use a model "
                    "of lightning_gnn.nn, or leave precompute out of the DataModule"
                )
            extra["x_aggregated"] = batch.x_aggregated
        if self._trims(batch):
            extra["num_sampled_nodes_per_hop"] = [int(n) for n in batch.num_sampled_nodes]
            extra["num_sampled_edges_per_hop"] = [int(n) for n in batch.num_sampled_edges]
        if isinstance(batch.edge_index, CompressedGraph) and batch.get("inference") is not None and not self.training:
            shown = {"bar": self._progress_shown(), "stop": self._stop_if_told}
            return infer(self.model, x, batch.edge_index, settings=batch.inference, **shown, **extra)
        if is_graph(batch.edge_index):
            check_takes_graph(self.model)
        try:
            out: Tensor = self.model(x, batch.edge_index, **extra)
        except RuntimeError as error:
            weights = {value.dtype for value in self.model.parameters() if value.is_floating_point()}
            if "dtype" not in str(error) or batch.x.dtype in weights or len(weights) != 1:
                raise
            (wanted,) = weights
            raise TypeError(
                f"x is {batch.x.dtype}, but the model's weights are {wanted}: use x.to({wanted})"
            ) from error
        return out

    def _forward_types(self, batch: HeteroData) -> Any:
        """Return the model's rows of each node type, from features and edges by type, as PyG's models do."""
        if featureless := [store._key for store in batch.node_stores if store.get("x") is None]:
            raise ValueError(
                f"nodes of {featureless[0]!r} have no features x: give some, or embeddings that are trained, as in "
                f"data[{featureless[0]!r}].x = torch.nn.Parameter(torch.randn(num_nodes, 64))"
            )
        extra = {
            name: values
            for name in ("edge_weight_dict", "edge_attr_dict")
            if name in self._forward_arguments and (values := batch.collect(name.removesuffix("_dict"), True))
        }
        out = self.model({name: self._widened(x) for name, x in batch.x_dict.items()}, batch.edge_index_dict, **extra)
        if not isinstance(out, Mapping):
            raise TypeError(
                f"a model of a graph with types must return rows by node type, but returns {type(out).__name__}"
            )
        return out

    def _widened(self, x: Tensor) -> Tensor:
        """Return features of 16 bits in the dtype of the weights, unless autocast takes them as they are."""
        if x.dtype not in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(x.device.type):
            return x
        weights = {value.dtype for value in self.model.parameters() if value.is_floating_point()}
        return x.to(torch.float32) if weights == {torch.float32} else x

    def _compare_hops(self, batch: Data) -> None:
        """Warn, once, where mini-batches have another number of hops than the model has layers."""
        if "hops" in self._checked:
            return
        self._checked.add("hops")
        hops, layers = batch.get("num_sampled_edges"), num_layers(self.model)
        if not isinstance(hops, (list, tuple)) or layers is None:
            return
        known = batch.get("x_aggregated") is not None  # for want of which there would be a hop more
        count = len(hops) + known
        if count == layers or (known and layers == 1):
            return
        effect = (
            "nodes of the last hop get no messages, so that the seeds' rows lack what lies farther away"
            if count < layers
            else "what is sampled beyond the layers changes nothing"
        )
        rank_zero_warn(
            f"the model has {layers} layers, but its mini-batches have {count} "
            f"hop{'s' if count != 1 else ''}: {effect}; give num_neighbors one fanout per layer"
        )

    def _tell_unfused(self, batch: Data) -> None:
        """Say, once, which layers run as PyG's operators on mini-batches on the CPU, and why."""
        if "fused" in self._checked or not self.training or self._trainer is None:
            return
        self._checked.add("fused")
        if batch.get("num_sampled_edges") is None or not isinstance(batch.edge_index, Tensor):
            return
        if batch.x.device.type in FUSED_ON and (reasons := unfused_layers(self.model)):
            told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            rank_zero_info(f"Layers that run as PyG's several operators, which take longer than one fused: {told}")

    def _progress_shown(self) -> Any:
        """Return the bars of Lightning's rich display, if there is one, since a terminal shows one display at a time.

        False says that no bars are wanted, None that others may be shown.
        """
        if self._trainer is None:
            return None
        callback: Any = self._trainer.progress_bar_callback
        if callback is None or callback.is_disabled:
            return False
        bar = getattr(callback, "progress", None)
        return bar if hasattr(bar, "add_task") else None

    def _stop_if_told(self) -> None:
        """Answer a signal that a callback waits to answer after the batch, which here may take hours.

        In training it must wait: the callback writes a checkpoint then.
        """
        trainer = self._trainer
        if trainer is None or trainer.world_size > 1 or trainer.state.fn == "fit":
            return
        if any(getattr(callback, "signal", None) is not None for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    def _trims(self, batch: Data) -> bool:
        if not {"num_sampled_nodes_per_hop", "num_sampled_edges_per_hop"} <= self._forward_arguments:
            return False
        if batch.get("num_sampled_nodes") is None or batch.get("num_sampled_edges") is None:
            return False
        hops = len(batch.num_sampled_edges) + (batch.get("x_aggregated") is not None)
        return trims_exactly(getattr(self.model, "_orig_mod", self.model), hops)

    def configure_optimizers(self) -> Any:
        """Return Adam, or what ``optimizer`` builds, with the scheduler if there is one.

        Raises:
            ValueError: the model has parameters without a size yet (``in_channels=-1``).
        """
        for name, parameter in self.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise ValueError(f"{name} has no size yet: give in_channels, or run the model on one batch first")
        if self._optimizer is None:
            optimizer: torch.optim.Optimizer = torch.optim.Adam(
                self.parameters(), lr=self.lr, weight_decay=self.weight_decay
            )
        else:
            optimizer = self._optimizer(self.parameters())
        if self._scheduler is None:
            return optimizer
        scheduler = self._scheduler(optimizer)
        if not isinstance(scheduler, dict):
            scheduler = {"scheduler": scheduler, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def _must_check(self, stage: str, values: Tensor) -> bool:
        """Say whether to look at ``values``: a look stalls a device, which gets one only at a stage's first batch."""
        must = stage not in self._checked or values.device.type == "cpu"
        self._checked.add(stage)
        return must

    def _log_loss(self, stage: str, losses: Tensor) -> Tensor:
        """Log ``losses``, one per node or edge, and return their mean."""
        loss, size = losses.mean(), losses.size(0)
        if stage == "train":
            self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=size)
            return loss
        # A metric, because it weights by size across processes too: Lightning's mean truncates the sizes on gloo.
        mean: MeanMetric = getattr(self, f"{stage}_loss")
        mean.update(losses.detach())
        self.log(f"{stage}_loss", mean, on_step=False, on_epoch=True, prog_bar=stage == "val", batch_size=size)
        return loss


class NodeClassifier(GNNModule):
    """Trains a PyG model to predict one of ``num_classes`` classes per node.

    It works on both kinds of batch, without configuration:

    - mini-batches of neighbour sampling (``x`` ``[N, F]``, ``edge_index`` ``[2, E]``, ``y``, ``batch_size``; with
      ``num_sampled_nodes`` and ``num_sampled_edges`` the model trims each layer): the first ``batch_size`` rows;
    - full graphs (no ``batch_size``): the rows of the stage's ``train_mask``, ``val_mask`` or ``test_mask`` ``[N]``.

    Of a graph with types (``HeteroData``), ``target`` names the type that is classified, and the model maps two
    dictionaries, of features and of edges, to one of rows, as those of PyG's ``to_hetero`` and ``HeteroConv`` do.

    ``y`` is int64, ``[N]`` or ``[N, 1]``. Logged, each weighted by the number of labelled nodes: ``train_loss``
    (``train_loss_step``, ``train_loss_epoch``), ``train_acc``, ``val_loss``, ``val_acc``, ``test_loss``, ``test_acc``.

    Checkpoints keep ``num_classes``, ``lr`` and ``weight_decay`` but no objects; give these again:
    ``NodeClassifier.load_from_checkpoint(path, model=model)``.

    Args:
        model: Maps ``x`` ``[N, F]`` and ``edge_index`` ``[2, E]`` to logits ``[N, num_classes]``.
        num_classes: Number of classes.
        lr: Learning rate of Adam.
        weight_decay: Weight decay of Adam.
        optimizer: Takes the parameters and returns an optimizer in place of Adam.
        scheduler: Takes the optimizer and returns a scheduler, or Lightning's ``lr_scheduler`` dictionary.
        target: The node type that is classified, for graphs with types.

    Raises:
        ValueError: an argument is out of range; at the first batch: features, labels or the stage's mask are missing,
            empty, of a wrong shape or type, a label is not in ``[0, num_classes)``, or the model has another number of
            outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., Any] | None = None,
        target: NodeType | None = None,
    ) -> None:
        super().__init__(model, lr, weight_decay, optimizer, scheduler)
        self.target = target
        if num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}")
        # Objects stay out, so that checkpoints can be read with weights_only=True.
        self.save_hyperparameters(ignore=["model", "optimizer", "scheduler"])
        self.num_classes = num_classes
        # Labels are checked here, once; torchmetrics would check them on the device at every batch.
        self.train_acc = MulticlassAccuracy(num_classes, average="micro", validate_args=False)
        self.val_acc = MulticlassAccuracy(num_classes, average="micro", validate_args=False)
        self.test_acc = MulticlassAccuracy(num_classes, average="micro", validate_args=False)

    def training_step(self, batch: Data | HeteroData, batch_idx: int) -> dict[str, Any]:
        """Return the mean cross-entropy of the batch's training nodes, ``loss``, and their number, ``weight``."""
        loss, weight = self._step(batch, "train")
        return {"loss": loss, "weight": weight}

    def validation_step(self, batch: Data | HeteroData, batch_idx: int) -> None:
        """Log loss and accuracy of the batch's validation nodes."""
        self._step(batch, "val")

    def test_step(self, batch: Data | HeteroData, batch_idx: int) -> None:
        """Log loss and accuracy of the batch's test nodes."""
        self._step(batch, "test")

    def _classified(self, batch: Data | HeteroData) -> Any:
        """Return what is classified: the batch, or its part of the type that is."""
        if isinstance(batch, HeteroData) == (self.target is None):
            raise ValueError(
                f"the batch has the types {', '.join(batch.node_types)}: give NodeClassifier(target=…)"
                if isinstance(batch, HeteroData)
                else f"target={self.target!r} needs batches with types, as of NeighborDataModule with a HeteroData"
            )
        if self.target is not None and self.target not in batch.node_types:
            raise ValueError(f"the batch has no type {self.target!r}, only {', '.join(batch.node_types)}")
        return batch if self.target is None else batch[self.target]

    def _logits(self, batch: Data | HeteroData) -> Tensor:
        out = self(batch)
        logits: Tensor = out if self.target is None else out[self.target]
        return logits

    def predict_step(self, batch: Data | HeteroData, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return logits ``[batch_size, num_classes]`` of the seeds, of all nodes for a full graph.

        A full graph may name the nodes in question, ``pred_nodes`` int64 ``[n]``. ``log_softmax(-1)`` of logits are
        log-probabilities.
        """
        part, logits = self._classified(batch), self._logits(batch)
        if "batch_size" in part:
            return logits[: part.batch_size]
        nodes = part.get("pred_nodes")
        return logits if nodes is None else logits[nodes.to(logits.device)]

    def _step(self, batch: Data | HeteroData, stage: str) -> tuple[Tensor, int]:
        part = self._classified(batch)
        nodes = self._labelled_nodes(part, stage)
        labels = self._labels(part, nodes, stage)
        logits = self._logits(batch)
        # Outputs that are memory-mapped stay so; the rows in question go to where the labels are.
        rows = nodes if isinstance(nodes, slice) else nodes.to(logits.device)
        logits = logits[rows].to(labels.device)
        if logits.size(-1) != self.num_classes:
            raise ValueError(f"the model has {logits.size(-1)} outputs, but num_classes is {self.num_classes}")
        accuracy: MulticlassAccuracy = getattr(self, f"{stage}_acc")
        accuracy.update(logits.detach(), labels)
        self.log(f"{stage}_acc", accuracy, on_step=False, on_epoch=True, prog_bar=True, batch_size=labels.size(0))
        return self._log_loss(stage, F.cross_entropy(logits, labels, reduction="none")), labels.size(0)

    def _labelled_nodes(self, batch: Any, stage: str) -> slice | Tensor:
        if "batch_size" in batch:
            if batch.batch_size < 1:
                raise ValueError(f"the {stage} batch has batch_size={batch.batch_size}: it has no seeds")
            return slice(0, batch.batch_size)
        mask = batch.get(f"{stage}_mask")
        if mask is None:
            raise ValueError(
                f"the batch has neither 'batch_size' (mini-batch) nor '{stage}_mask' (full graph), "
                f"only {sorted(batch.keys())}"
            )
        if mask.dtype != torch.bool or mask.dim() != 1 or mask.size(0) != batch.num_nodes:
            raise ValueError(
                f"{stage}_mask must be a bool tensor [{batch.num_nodes}], got {mask.dtype} {list(mask.shape)}; "
                f"of several splits choose one column"
            )
        nodes: Tensor = mask.nonzero().view(-1)
        if nodes.numel() == 0:
            raise ValueError(f"{stage}_mask marks none of the {batch.num_nodes} nodes")
        return nodes

    def _labels(self, batch: Any, nodes: slice | Tensor, stage: str) -> Tensor:
        y = batch.get("y")
        if y is None:
            raise ValueError(f"the batch has no labels 'y', only {sorted(batch.keys())}")
        if y.dim() == 2 and y.size(1) == 1:
            y = y.view(-1)
        if y.dim() != 1 or y.is_floating_point() or y.dtype == torch.bool:
            raise ValueError(
                f"y must hold one integer class per node, int64 [N] or [N, 1], got {y.dtype} {list(y.shape)}; "
                f"multi-label and regression targets need another module"
            )
        labels: Tensor = y[nodes].long()
        if self._must_check(stage, labels):
            for value in (int(labels.min()), int(labels.max())):
                if not 0 <= value < self.num_classes:
                    raise ValueError(
                        f"y holds label {value}, but num_classes={self.num_classes} allows 0 to {self.num_classes - 1}"
                    )
        return labels

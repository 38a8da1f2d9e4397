"""What all tasks share: a PyG model as a LightningModule, its optimizer, and the forward pass over any batch."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType, NodeType
from torchmetrics import MeanMetric, Metric

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.nn.conv import unfused_layers
from lightning_gnn.nn.conv.fused import FUSED_ON
from lightning_gnn.nn.conv.graph import check_takes_graph, is_graph
from lightning_gnn.nn.embeddings import TypeEmbeddings
from lightning_gnn.nn.inference import Elsewhere
from lightning_gnn.nn.models import num_layers, trims_exactly
from lightning_gnn.nn.optimizers import SplitOptimizer, with_values
from lightning_gnn.nn.sampled_edges import in_sampled_order, moved
from lightning_gnn.runtime.precision import convert_batches

_COUNTS_BY_TYPE = ("num_sampled_nodes_dict", "num_sampled_edges_dict")


class GNNModule(pl.LightningModule):
    """A PyG model, its optimizer, and the forward pass over any batch: what all tasks share.

    Args:
        model: Maps ``x`` ``[N, F]`` and ``edge_index`` ``[2, E]`` to one row per node. Any PyG model will do.
        lr: Learning rate of Adam, for ``optimizer=None``.
        weight_decay: Weight decay of Adam, for ``optimizer=None``.
        optimizer: Takes the parameters and returns an optimizer, e.g. ``functools.partial(torch.optim.SGD, lr=0.1)``.
        scheduler: Takes the optimizer and returns a scheduler (one step per epoch; a plateau scheduler watches
            ``val_loss``) or Lightning's ``lr_scheduler`` dictionary.
        embeddings: Rows that are trained, for types of nodes without features.

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
        self._forward_arguments = frozenset(inspect.signature(getattr(model, "_orig_mod", model).forward).parameters)
        self._checked: set[str] = set()
        # "disable" hands a NaN on to EarlyStopping and the user, where the default drops it (and looks for it, which
        # stalls a device). torchmetrics 1.9 then ignores weights, so update it with a loss per node.
        self.val_loss: Metric = MeanMetric(nan_strategy="disable")
        self.test_loss: Metric = MeanMetric(nan_strategy="disable")

    def forward(self, batch: Data | HeteroData) -> Any:
        """Return the model's rows for the batch's first nodes, seeds first; of a graph with types, those of each type.

        The batch's ``edge_weight`` and ``edge_attr`` are passed on to models that take them, and so are the numbers of
        sampled nodes and edges per hop when trimming by them cannot change the seeds' rows. In evaluation, a whole
        graph with the attribute ``inference`` is run by :func:`~lightning_gnn.nn.infer`. Features of 16 bits are
        widened for a model of float32, except under autocast.

        Raises:
            TypeError: the batch holds a compressed graph, and the model has layers that need an ``edge_index`` tensor;
                ``x`` is of another dtype than the weights.
            ValueError: the batch has no ``x`` or no ``edge_index``.
        """
        try:
            return self._forward_types(batch) if isinstance(batch, HeteroData) else self._forward_nodes(batch)
        except (RuntimeError, TypeError) as error:
            found = {store.x.dtype for store in batch.node_stores if store.get("x") is not None}
            weights = {value.dtype for value in self.model.parameters() if value.is_floating_point()}
            others = sorted(found - weights, key=str)
            if "type" not in str(error) or not others or len(weights) != 1:
                raise
            fix = " or Trainer(precision='64-true')" if others[0] == torch.float64 else ""
            what = f"x is {others[0]}, but the model's weights are not: use x.to(torch.float32){fix}"
            raise TypeError(what) from error

    def _forward_nodes(self, batch: Data) -> Tensor:
        """Return the model's rows of a graph of one type."""
        # Check the batch, and warn if hops and layers do not match.
        for name in ("x", "edge_index"):
            if batch.get(name) is None:
                raise ValueError(f"the batch has no {name!r}, only {sorted(batch.keys())}")
        self._compare_hops(batch)
        x = self._widened(batch.x)
        self._name_unfused(batch)
        # Pass on only what the model takes.
        extra: dict[str, Any] = {}
        for name in ("edge_weight", "edge_attr"):
            takes = name in self._forward_arguments and getattr(self.model, f"supports_{name}", True)
            if takes and batch.get(name) is not None:
                extra[name] = batch[name]
        if self._trims(batch):
            extra["num_sampled_nodes_per_hop"] = [int(n) for n in batch.num_sampled_nodes]
            extra["num_sampled_edges_per_hop"] = [int(n) for n in batch.num_sampled_edges]
        # In evaluation, a whole graph is computed layer by layer, so that it need not fit on the device.
        settings = batch.get("inference") if isinstance(batch.edge_index, CompressedGraph | Elsewhere) else None
        if settings is not None and not self.training:
            whole: Tensor = settings.run(self.model, x, batch.edge_index, stop=self._stop_at_signal, **extra)
            return whole
        # Layers that need an edge tensor are refused by name.
        if is_graph(batch.edge_index):
            check_takes_graph(self.model)
        rows: Tensor = self.model(x, batch.edge_index, **extra)
        return rows

    def _forward_types(self, batch: HeteroData) -> Any:
        """Return the model's rows of each node type, from features and edges by type, as PyG's models do."""
        # In evaluation, a whole graph is computed layer by layer, so that it need not fit on the device.
        if (inference := getattr(batch, "inference", None)) is not None and not self.training:
            return inference.run_types(self.model, self.embeddings, self._stop_at_signal)
        # Types without features need embeddings that are trained.
        found = batch.collect("x", True) | (self.embeddings(batch) if self.embeddings is not None else {})
        if featureless := [name for name in batch.node_types if name not in found]:
            raise ValueError(
                f"nodes of {featureless[0]!r} have no features x: give some, or embeddings that are trained, as in "
                f"{type(self).__name__}(…, embeddings=TypeEmbeddings(data, 64))"
            )
        # Counts by hop are passed on only if the model takes them and trimming cannot change the seeds' rows.
        trims = self._forward_arguments.issuperset(_COUNTS_BY_TYPE) and in_sampled_order(
            batch, {name: found[name].size(0) for name in batch.node_types}
        )
        extra = {
            name: values
            for name in ("edge_weight_dict", "edge_attr_dict", *(_COUNTS_BY_TYPE if trims else ()))
            if name in self._forward_arguments and (values := batch.collect(name.removesuffix("_dict"), True))
        }
        self._compare_hops(batch)
        self._name_unfused(batch)
        # Run the model, and check that it returns rows by type.
        x_dict = {name: self._widened(found[name]) for name in batch.node_types}
        out = self.model(x_dict, batch.edge_index_dict, **extra)
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

    def _compare_hops(self, batch: Data | HeteroData) -> None:
        """Warn, once, where mini-batches have another number of hops than the model has layers."""
        if "hops" in self._checked:
            return
        self._checked.add("hops")
        hops, layers = _num_hops(batch), num_layers(self.model)
        if hops is None or layers is None or hops == layers:
            return
        effect = (
            "nodes of the last hop get no messages, so that the seeds' rows lack what lies farther away"
            if hops < layers
            else "what is sampled beyond the layers changes nothing"
        )
        rank_zero_warn(
            f"the model has {layers} layers, but its mini-batches have {hops} "
            f"hop{'s' if hops != 1 else ''}: {effect}; give num_neighbors one fanout per layer"
        )

    def _name_unfused(self, batch: Data | HeteroData) -> None:
        """Say, once, which layers run as PyG's operators on mini-batches on the CPU, and why."""
        if "fused" in self._checked or not self.training or self._trainer is None:
            return
        self._checked.add("fused")
        found = batch.collect("edge_index", True).values() if isinstance(batch, HeteroData) else [batch.edge_index]
        devices = {edges.device.type for edges in found if isinstance(edges, Tensor)}
        if _num_hops(batch) is None or not devices:
            return
        if devices <= set(FUSED_ON) and (reasons := unfused_layers(self.model)):
            which = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            rank_zero_info(f"Layers that run as PyG's several operators, which take longer than one fused: {which}")

    def _stop_at_signal(self) -> None:
        """Answer a signal that a callback would answer after the batch, which here may take hours; not in training."""
        trainer = self._trainer
        if trainer is None or trainer.world_size > 1 or trainer.state.fn == "fit":
            return
        if any(getattr(callback, "signal", None) is not None for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    def setup(self, stage: str) -> None:
        """Let the trainer convert batches of PyG to its precision, as it converts tensors."""
        convert_batches(self.trainer)

    def _call_batch_hook(self, hook_name: str, *args: object) -> object:
        """Move a batch, and note that its edges are as they were sampled, which a device would have to be asked."""
        call = partial(super()._call_batch_hook, hook_name)
        owners = (self, getattr(self._trainer, "datamodule", None))
        if hook_name != "transfer_batch_to_device" or any(is_overridden(hook_name, owner) for owner in owners):
            return call(*args)
        return moved(args[0], lambda batch: call(batch, *args[1:]))

    def _trims(self, batch: Data) -> bool:
        if not {"num_sampled_nodes_per_hop", "num_sampled_edges_per_hop"} <= self._forward_arguments:
            return False
        if batch.get("num_sampled_nodes") is None or batch.get("num_sampled_edges") is None:
            return False
        exact = trims_exactly(getattr(self.model, "_orig_mod", self.model), len(batch.num_sampled_edges))
        return exact and in_sampled_order(batch, {None: batch.x.size(0)})

    def configure_optimizers(self) -> Any:
        """Return Adam, or what ``optimizer`` builds, with the scheduler; sparse embeddings have their own in it.

        Raises:
            ValueError: the model has parameters without a size yet (``in_channels=-1``).
        """
        for name, parameter in self.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise ValueError(f"{name} has no size yet: give in_channels, or run the model on one batch first")
        tables = [] if self.embeddings is None or not self.embeddings.sparse else list(self.embeddings.parameters())
        apart = {id(table) for table in tables}
        others = [parameter for parameter in self.parameters() if id(parameter) not in apart]
        if self._optimizer is None:
            optimizer: torch.optim.Optimizer = torch.optim.Adam(others, lr=self.lr, weight_decay=self.weight_decay)
        else:
            optimizer = self._optimizer(others)
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
        """Clip gradients as Lightning does, sparse ones by the values that they have."""
        clipped = with_values(optimizer) if gradient_clip_val else optimizer
        super().configure_gradient_clipping(clipped, gradient_clip_val, gradient_clip_algorithm)

    def _check_types(
        self, batch: Data | HeteroData, target: NodeType | EdgeType | None, names: Sequence[NodeType]
    ) -> None:
        """Refuse a batch without the node types of what is predicted, or with types where no target is given."""
        if isinstance(batch, HeteroData) == (target is None):
            raise ValueError(
                f"the batch has the types {', '.join(batch.node_types)}: give {type(self).__name__}(target=…)"
                if isinstance(batch, HeteroData)
                else f"target={target!r} needs batches with types, as of a DataModule with a HeteroData"
            )
        for name in names:
            if name not in batch.node_types:
                raise ValueError(f"the batch has no type {name!r}, only {', '.join(batch.node_types)}")

    def _must_check(self, stage: str, values: Tensor) -> bool:
        """Say whether to look at ``values``: a look stalls a device, which gets one only at a stage's first batch."""
        must = stage not in self._checked or values.device.type == "cpu"
        self._checked.add(stage)
        return must

    def _log_loss(self, stage: str, losses: Tensor, weights: Tensor | None = None) -> Tensor:
        """Log ``losses`` ``[n]``, times their weights where they have some, and return their mean."""
        loss, size = losses.mean() if weights is None else losses.sum() / weights.sum(), losses.size(0)
        if stage == "train":
            self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=size)
            return loss
        # A metric, because it weights by size across processes too: Lightning's mean truncates the sizes on gloo.
        mean: Metric = getattr(self, f"{stage}_loss")
        mean.update(losses.detach(), *(() if weights is None else (weights,)))
        self.log(f"{stage}_loss", mean, on_step=False, on_epoch=True, prog_bar=stage == "val", batch_size=size)
        return loss


def _num_hops(batch: Data | HeteroData) -> int | None:
    """Return how many hops were sampled; None for a whole graph."""
    if isinstance(batch, HeteroData):
        by_type = batch.collect("num_sampled_edges", True)
        return max((len(numbers) for numbers in by_type.values()), default=None)
    hops = batch.get("num_sampled_edges")
    return len(hops) if isinstance(hops, (list, tuple)) else None

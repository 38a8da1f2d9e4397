"""Base LightningModule of all tasks: a PyG model, its optimizer, and the forward pass for any batch."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType, NodeType
from torchmetrics import Metric

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.nn.conv import unfused_layers
from lightning_gnn.nn.conv.fused import FUSED_ON
from lightning_gnn.nn.conv.graph import check_takes_graph, is_graph
from lightning_gnn.nn.embeddings import TypeEmbeddings
from lightning_gnn.nn.inference import Elsewhere, widen_features
from lightning_gnn.nn.metrics import WeightedMean
from lightning_gnn.nn.models import num_layers, trims_exactly
from lightning_gnn.nn.optimizers import SplitOptimizer, densify_gradients
from lightning_gnn.nn.sampled_edges import in_sampled_order, moved
from lightning_gnn.runtime.lightning import check_script, is_overridden, pl, rank_zero_info, rank_zero_warn
from lightning_gnn.runtime.precision import convert_batches

_TRAIN_FEATURES = (
    ": add features, or train an embedding of each node, which the module owns and the graph shares (before the "
    "DataModule is created): data.x = module.x = torch.nn.Parameter(torch.randn(data.num_nodes, 64)), where module is "
    "the {module}, whose model takes 64 features"
)
_COUNTS_BY_TYPE = ("num_sampled_nodes_dict", "num_sampled_edges_dict")


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
        self._forward_arguments = frozenset(inspect.signature(getattr(model, "_orig_mod", model).forward).parameters)
        self._checked: set[str] = set()
        self.val_loss, self.test_loss = WeightedMean(), WeightedMean()

    def forward(self, batch: Data | HeteroData) -> Any:
        """Return the model's outputs for the batch's first nodes, seeds first; by node type for a heterogeneous graph.

        The batch's ``edge_weight`` and ``edge_attr`` are passed to models that take them. So are the numbers of sampled
        nodes and edges per hop if trimming cannot change the seeds' outputs. In evaluation,
        :func:`~lightning_gnn.nn.infer` processes a whole graph that has the attribute ``inference``. 16-bit features
        are converted for a float32 model, except under autocast.

        Raises:
            TypeError: The batch holds a compressed graph, but layers of the model need an ``edge_index`` tensor; or
                the dtype of ``x`` differs from the weights; or the batch is not a graph.
            ValueError: The batch has no ``x`` or no ``edge_index``.
        """
        self._check_graph(batch)
        try:
            return self._forward_types(batch) if isinstance(batch, HeteroData) else self._forward_nodes(batch)
        except (RuntimeError, TypeError) as error:
            dtypes = {store.x.dtype for store in batch.node_stores if store.get("x") is not None}
            weights = {value.dtype for value in self.model.parameters() if value.is_floating_point()}
            unexpected = sorted(dtypes - weights, key=str)
            if "type" not in str(error) or not unexpected or len(weights) != 1:
                raise
            raise TypeError(_advise_dtype(unexpected[0], *weights)) from error

    def _forward_nodes(self, batch: Data) -> Tensor:
        """Return the model's outputs for a homogeneous graph."""
        # Check the batch, and warn if the numbers of hops and layers differ.
        for name in ("x", "edge_index"):
            if batch.get(name) is None:
                fix = _TRAIN_FEATURES.format(module=type(self).__name__) if name == "x" else ""
                raise ValueError(f"the batch has no {name!r}, only {sorted(batch.keys())}{fix}")
        self._check_hops(batch)
        self._log_unfused(batch)
        # Pass only arguments that the model takes.
        extra: dict[str, Any] = {}
        for name in ("edge_weight", "edge_attr"):
            takes = name in self._forward_arguments and getattr(self.model, f"supports_{name}", True)
            if takes and batch.get(name) is not None:
                extra[name] = batch[name]
        if every_hop := bool(batch.get("every_hop")):
            if "every_hop" not in self._forward_arguments:
                raise ValueError(
                    f"with semantics='every_hop' each layer has its own edges, but {type(self.model).__name__} takes "
                    "one edge_index: use GraphSAGE, GIN or GAT of lightning_gnn.nn, or layer_blocks(batch)"
                )
            if not in_sampled_order(batch, {None: batch.x.size(0)}):
                raise ValueError("a transform changed the edges, but semantics='every_hop' needs those of each hop")
            extra["every_hop"] = True
        if every_hop or self._trims(batch):
            extra["num_sampled_nodes_per_hop"] = [int(n) for n in batch.num_sampled_nodes]
            extra["num_sampled_edges_per_hop"] = [int(n) for n in batch.num_sampled_edges]
        # In evaluation, process a whole graph layer by layer, so that it does not have to fit on the device.
        settings = batch.get("inference") if isinstance(batch.edge_index, CompressedGraph | Elsewhere) else None
        if settings is not None and not self.training:
            whole: Tensor = settings.run(self.model, batch.x, batch.edge_index, **extra)
            return whole
        # Reject layers that need an edge tensor, by name.
        if is_graph(batch.edge_index):
            check_takes_graph(self.model)
        rows: Tensor = self.model(widen_features(batch.x, self.model), batch.edge_index, **extra)
        return rows

    def _forward_types(self, batch: HeteroData) -> Any:
        """Return the model's outputs by node type, from features and edges by type, as in PyG."""
        # In evaluation, process a whole graph layer by layer, so that it does not have to fit on the device.
        if (inference := getattr(batch, "inference", None)) is not None and not self.training:
            return inference.run_types(self.model, self.embeddings)
        # Node types without features need trainable embeddings.
        features = batch.collect("x", True) | (self.embeddings(batch) if self.embeddings is not None else {})
        if featureless := [name for name in batch.node_types if name not in features]:
            raise ValueError(
                f"nodes of {featureless[0]!r} have no features x: add features, or trainable embeddings with "
                f"{type(self).__name__}(…, embeddings=TypeEmbeddings(data, 64))"
            )
        # Pass the counts per hop only if the model takes them and trimming cannot change the seeds' outputs.
        trims = self._forward_arguments.issuperset(_COUNTS_BY_TYPE) and in_sampled_order(
            batch, {name: features[name].size(0) for name in batch.node_types}
        )
        extra = {
            name: values
            for name in ("edge_weight_dict", "edge_attr_dict", *(_COUNTS_BY_TYPE if trims else ()))
            if name in self._forward_arguments and (values := batch.collect(name.removesuffix("_dict"), True))
        }
        self._check_hops(batch)
        self._log_unfused(batch)
        # Run the model, and check that it returns outputs by node type.
        x_dict = {name: widen_features(features[name], self.model) for name in batch.node_types}
        out = self.model(x_dict, batch.edge_index_dict, **extra)
        if not isinstance(out, Mapping):
            raise TypeError(
                f"a model for heterogeneous graphs must return a dict by node type, but returns {type(out).__name__}"
            )
        return out

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
        """Log once which layers are not fused on mini-batches on the CPU, and why."""
        if "fused" in self._checked or not self.training or self._trainer is None:
            return
        self._checked.add("fused")
        found = batch.collect("edge_index", True).values() if isinstance(batch, HeteroData) else [batch.edge_index]
        devices = {edges.device.type for edges in found if isinstance(edges, Tensor)}
        if _num_hops(batch) is None or not devices:
            return
        if devices <= set(FUSED_ON) and (reasons := unfused_layers(self.model)):
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

    def _trims(self, batch: Data) -> bool:
        if not {"num_sampled_nodes_per_hop", "num_sampled_edges_per_hop"} <= self._forward_arguments:
            return False
        if batch.get("num_sampled_nodes") is None or batch.get("num_sampled_edges") is None:
            return False
        exact = trims_exactly(getattr(self.model, "_orig_mod", self.model), len(batch.num_sampled_edges))
        return exact and in_sampled_order(batch, {None: batch.x.size(0)})

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

    def _check_graph(self, batch: object) -> None:
        """Raise a TypeError if the batch is not a graph, such as a dict that a transform returned."""
        if not isinstance(batch, Data | HeteroData):
            raise TypeError(
                f"{type(self).__name__} needs a batch of torch_geometric.data.Data or HeteroData, but got "
                f"{type(batch).__name__}: let the transform return the graph, or use your own LightningModule"
            )

    def _check_types(
        self, batch: Data | HeteroData, target: NodeType | EdgeType | None, names: Sequence[NodeType]
    ) -> None:
        """Raise an error unless the batch is a graph with the node types of the target, or without types and target."""
        self._check_graph(batch)
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


def _advise_dtype(found: torch.dtype, weights: torch.dtype) -> str:
    """Return the error message for features of another dtype than the model's weights."""
    fixes = [f"x.to({weights})"]
    if torch.float64 in (found, weights):
        fixes.append("Trainer(precision='64-true')")
    elif weights == torch.bfloat16:
        fixes.append("Trainer(precision='bf16-true')")
    if weights == torch.get_default_dtype() != torch.float32:
        fixes.append("torch.set_default_dtype(torch.float32) before the model is built")
    return f"x is {found}, but the model's weights are {weights}: use {' or '.join(fixes)}"


def _widen(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _num_hops(batch: Data | HeteroData) -> int | None:
    """Return the number of sampled hops, or None for a whole graph."""
    if isinstance(batch, HeteroData):
        by_type = batch.collect("num_sampled_edges", True)
        return max((len(numbers) for numbers in by_type.values()), default=None)
    hops = batch.get("num_sampled_edges")
    return len(hops) if isinstance(hops, (list, tuple)) else None

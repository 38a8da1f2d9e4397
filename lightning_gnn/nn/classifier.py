"""Node classification: one class per node, or any number of labels."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.typing import NodeType
from torchmetrics.classification import MulticlassAccuracy, MultilabelF1Score

from lightning_gnn.nn.embeddings import TypeEmbeddings
from lightning_gnn.nn.metrics import log_odds
from lightning_gnn.nn.node_module import NodeModule

LOGGED_STAGES = ("train", "val", "test")
KINDS = ("multiclass", "multilabel")


class NodeClassifier(NodeModule):
    """Trains a PyG model to predict one of ``num_classes`` classes per node, or a subset of them (multi-label).

    It works on both kinds of batch, without configuration:

    - mini-batches of neighbor sampling (``x`` ``[N, F]``, ``edge_index`` ``[2, E]``, ``y``, ``batch_size``; with
      ``num_sampled_nodes`` and ``num_sampled_edges`` the model trims each layer): the first ``batch_size`` rows;
    - full graphs (no ``batch_size``): the rows of the stage's ``train_mask``, ``val_mask`` or ``test_mask`` ``[N]``.

    For heterogeneous graphs (``HeteroData``), the model maps dictionaries of features and of edges to a dictionary of
    outputs, as :class:`~lightning_gnn.nn.RGCN` and the models of PyG's ``to_hetero`` and ``HeteroConv`` do.

    ``y`` is int64, ``[N]`` or ``[N, 1]``; for ``kind="multilabel"`` it holds 0 and 1 (or False and True), ``[N,
    num_classes]``. Logged values, weighted by the number of labeled nodes: ``train_loss`` (``train_loss_step``,
    ``train_loss_epoch``), ``val_loss``, ``test_loss``; ``train_acc``, ``val_acc``, ``test_acc``, or for multi-label
    the micro-averaged ``train_f1``, ``val_f1``, ``test_f1``; and the ``metrics``. Checkpoints do not contain the model
    object: ``NodeClassifier.load_from_checkpoint(path, model=model)``.
    :class:`~lightning_gnn.nn.GNNModule` documents the other arguments.

    Args:
        model: Maps ``x`` ``[N, F]`` and ``edge_index`` ``[2, E]`` to logits ``[N, num_classes]``.
        target: The node type to classify, for heterogeneous graphs.
        kind: ``"multiclass"`` (cross-entropy), or ``"multilabel"`` (binary cross-entropy, the mean over labels).
        class_weights: Positive weight of each class: ``weight`` of torch's ``cross_entropy``, so that losses are
            divided by the sum of the nodes' weights; for multi-label torch's ``pos_weight``.
        label_smoothing: ``label_smoothing`` of torch's ``cross_entropy``, in [0, 1).
        metrics: Additional validation and test metrics, by the names of
            :func:`~lightning_gnn.nn.metrics.named_metric`: ``["top5", "macro_f1"]`` as ``val_top5``, ``val_macro_f1``.

    Raises:
        ValueError: An argument is out of range; at the first batch: features, labels or the stage's mask are missing,
            empty or have a wrong shape or dtype, a label is out of range, or the number of model outputs is wrong.
    """

    class_weights: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., Any] | None = None,
        target: NodeType | None = None,
        kind: Literal["multiclass", "multilabel"] = "multiclass",
        class_weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
        metrics: Sequence[str] = (),
        embeddings: TypeEmbeddings | None = None,
    ) -> None:
        super().__init__(model, lr, weight_decay, optimizer, scheduler, embeddings)
        self.target = target
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is unknown; use one of {', '.join(KINDS)}")
        if num_classes < (2 if kind == "multiclass" else 1):
            raise ValueError(f"num_classes must be at least {2 if kind == 'multiclass' else 1}, got {num_classes}")
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
        if label_smoothing and kind == "multilabel":
            raise ValueError("label_smoothing is for one class per node: leave it out for kind='multilabel'")
        if class_weights is not None:
            class_weights = [float(weight) for weight in class_weights]
            if len(class_weights) != num_classes or not all(0 < weight < math.inf for weight in class_weights):
                raise ValueError(f"class_weights must be {num_classes} positive numbers, got {class_weights}")
        # Exclude objects, so that checkpoints can be loaded with weights_only=True.
        self.save_hyperparameters(ignore=["model", "optimizer", "scheduler", "embeddings"])
        self.num_classes = num_classes
        self.kind = kind
        self.label_smoothing = label_smoothing
        # Not persistent: the checkpoint stores the weights as a hyperparameter.
        weights = None if class_weights is None else torch.tensor(class_weights)
        self.register_buffer("class_weights", weights, persistent=False)
        self.metric_name = "acc" if kind == "multiclass" else "f1"
        metric = MulticlassAccuracy if kind == "multiclass" else MultilabelF1Score
        for stage in LOGGED_STAGES:
            # _labels checks the labels; torchmetrics would check them on the device at every batch.
            setattr(self, f"{stage}_{self.metric_name}", metric(num_classes, average="micro", validate_args=False))
        self._create_metrics(metrics, kind, num_classes)

    def _to_scores(self, rows: Tensor) -> Tensor:
        # Any increasing map with 1/2 at 0 works for labels; a sigmoid would round large outputs to ties at 1.
        rows = rows.float()
        return rows.softmax(1) if self.kind == "multiclass" else (F.softsign(rows) + 1) / 2

    def _to_ranked(self, rows: Tensor) -> Tensor:
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return log_odds(rows) if self.kind == "multiclass" else rows

    def _compute_losses(self, rows: Tensor, labels: Tensor) -> Tensor:
        weights = self.class_weights
        if weights is not None:  # in 16 bits they would differ from the weights in the denominator of the mean
            dtype = torch.promote_types(rows.dtype, weights.dtype)
            rows, weights = rows.to(dtype), weights.to(rows.device, dtype)
        if self.kind == "multiclass":
            smoothing = self.label_smoothing
            return F.cross_entropy(rows, labels, weight=weights, reduction="none", label_smoothing=smoothing)
        targets = labels.to(rows.dtype)
        return F.binary_cross_entropy_with_logits(rows, targets, reduction="none", pos_weight=weights).mean(1)

    def _weights(self, labels: Tensor) -> Tensor | None:
        if self.class_weights is None or self.kind == "multilabel":
            return None
        return self.class_weights.to(labels.device)[labels]

    def _check_rows(self, rows: Tensor, labels: Tensor) -> None:
        if rows.size(-1) != self.num_classes:
            raise ValueError(f"the model has {rows.size(-1)} outputs, but num_classes is {self.num_classes}")

    def _labels(self, y: Tensor, nodes: slice | Tensor, stage: str) -> Tensor:
        if self.kind == "multilabel":
            if y.dim() != 2 or y.size(1) != self.num_classes:
                raise ValueError(f"y must hold {self.num_classes} labels per node, 0 or 1, got {list(y.shape)}")
            labels = y[nodes]
            if self._must_check(stage, labels) and (invalid := labels[(labels != 0) & (labels != 1)]).numel():
                raise ValueError(f"y holds {invalid[0].item()}, but must be 0 or 1 for kind='multilabel'")
            return labels.long()
        if y.dim() == 2 and y.size(1) == 1:
            y = y.view(-1)
        if y.dim() != 1 or y.is_floating_point() or y.dtype == torch.bool:
            raise ValueError(
                f"y must hold one integer class per node, int64 [N] or [N, 1], got {y.dtype} {list(y.shape)}; "
                f"for several labels per node use kind='multilabel', for numbers NodeRegressor"
            )
        labels = y[nodes].long()
        if self._must_check(stage, labels):
            for value in (int(labels.min()), int(labels.max())):
                if not 0 <= value < self.num_classes:
                    hint = ": a seed node has no label; remove it from the split"
                    raise ValueError(
                        f"y holds label {value}, but num_classes={self.num_classes} allows 0 to {self.num_classes - 1}"
                        f"{hint if value == -1 else ''}"
                    )
        return labels

"""Node regression."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.typing import NodeType
from torchmetrics import MeanAbsoluteError

from lightning_gnn.nn.classifier import LOGGED_STAGES
from lightning_gnn.nn.embeddings import TypeEmbeddings
from lightning_gnn.nn.node_module import NodeModule


class NodeRegressor(NodeModule):
    """Trains a PyG model to predict one or more numbers per node, with the mean squared error as loss.

    Batches and arguments are those of :class:`~lightning_gnn.nn.NodeClassifier`; ``y`` is floating, ``[N]`` or ``[N,
    T]``, and the model has T outputs. Logged values, weighted by the number of labeled nodes: ``train_loss``,
    ``val_loss``, ``test_loss``, the mean absolute error ``train_mae``, ``val_mae``, ``test_mae``, and the ``metrics``.

    Args:
        model: Maps ``x`` ``[N, F]`` and ``edge_index`` ``[2, E]`` to numbers ``[N, T]``.
        metrics: Additional validation and test metrics: ``"mse"``, ``"rmse"``, ``"r2"``, logged as ``val_r2``.

    Raises:
        ValueError: Same as NodeClassifier, or at the first batch: a number is NaN or infinite.
    """

    metric_name = "mae"

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., Any] | None = None,
        target: NodeType | None = None,
        metrics: Sequence[str] = (),
        embeddings: TypeEmbeddings | None = None,
    ) -> None:
        super().__init__(model, lr, weight_decay, optimizer, scheduler, embeddings)
        self.target = target
        # Exclude objects, so that checkpoints can be loaded with weights_only=True.
        self.save_hyperparameters(ignore=["model", "optimizer", "scheduler", "embeddings"])
        for stage in LOGGED_STAGES:
            setattr(self, f"{stage}_mae", MeanAbsoluteError())
        self._create_metrics(metrics, "regression")

    def _labels(self, y: Tensor, nodes: slice | Tensor, stage: str) -> Tensor:
        if y.dim() not in (1, 2) or not y.is_floating_point():
            raise ValueError(
                f"y must hold numbers, floating [N] or [N, T], got {y.dtype} {list(y.shape)}; for classes use "
                "NodeClassifier"
            )
        numbers = y[nodes].view(-1, 1 if y.dim() == 1 else y.size(1))
        if self._must_check(stage, numbers) and not numbers.isfinite().all():
            raise ValueError("y holds NaN or infinity among the labeled nodes")
        return numbers

    def _check_rows(self, rows: Tensor, labels: Tensor) -> None:
        if rows.shape != labels.shape:
            raise ValueError(f"the model has {rows.size(-1)} outputs, but y has {labels.size(1)} numbers per node")

    def _compute_losses(self, rows: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(rows, labels.to(rows.dtype), reduction="none").mean(1)

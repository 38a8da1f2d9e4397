"""Base LightningModule for node predictions, on neighbor-sampled mini-batches and on full graphs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import NodeType
from torchmetrics import Metric

from lightning_gnn.nn.metrics import MetricTask, RankedByOutputs, TopAccuracy, named_metric
from lightning_gnn.nn.module import GNNModule


class NodeModule(GNNModule):
    """Base class of node predictions; subclasses define a metric ``{stage}_{metric_name}`` for each stage."""

    metric_name: str
    metric_names: Sequence[str] = ()
    target: NodeType | None

    def training_step(self, batch: Data | HeteroData, batch_idx: int) -> dict[str, Any]:
        """Return the mean ``loss`` of the batch's training nodes, and their total ``weight``."""
        loss, weight = self._step(batch, "train")
        return {"loss": loss, "weight": weight}

    def validation_step(self, batch: Data | HeteroData, batch_idx: int) -> None:
        """Log the loss and the metrics of the batch's validation nodes."""
        self._step(batch, "val")

    def test_step(self, batch: Data | HeteroData, batch_idx: int) -> None:
        """Log the loss and the metrics of the batch's test nodes."""
        self._step(batch, "test")

    def predict_step(self, batch: Data | HeteroData, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the model's outputs ``[batch_size, outputs]`` for the seeds, or for all nodes of a full graph.

        ``pred_nodes`` int64 ``[n]`` selects nodes of a full graph. A classifier returns logits.
        """
        store, rows = self._predicted(batch), self._rows(batch)
        if "batch_size" in store:
            return rows[: store.batch_size]
        nodes = store.get("pred_nodes")
        return rows if nodes is None else rows[nodes.to(rows.device)]

    def _create_metrics(self, names: Sequence[str], kind: MetricTask, num_outputs: int = 1) -> None:
        """Build metrics by name; see :func:`~lightning_gnn.nn.metrics.named_metric`."""
        names = [names] if isinstance(names, str) else names
        self.metric_names = [name for name in dict.fromkeys(names) if name != self.metric_name]
        for stage in ("val", "test"):
            for name in self.metric_names:
                setattr(self, f"{stage}_{name}", named_metric(name, kind, num_outputs))

    def _to_scores(self, rows: Tensor) -> Tensor:
        """Return outputs for the named metrics: scores from 0 to 1 if labels are classes."""
        return rows

    def _to_ranked(self, rows: Tensor) -> Tensor:
        """Return outputs for curves over all nodes, which compare them: different ones must not become ties."""
        return rows

    def _labels(self, y: Tensor, nodes: slice | Tensor, stage: str) -> Tensor:
        """Return the checked labels of the selected nodes."""
        raise NotImplementedError

    def _compute_losses(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per node, multiplied by the node's weight, if any."""
        raise NotImplementedError

    def _weights(self, labels: Tensor) -> Tensor | None:
        """Return the weight of each node in the mean, or None if all weights are 1."""
        return None

    def _check_rows(self, rows: Tensor, labels: Tensor) -> None:
        """Raise a ValueError if the shape of the outputs does not match the labels."""
        raise NotImplementedError

    def _predicted(self, batch: Data | HeteroData) -> Any:
        """Return the store to predict: the batch, or its store of the target type."""
        self._check_types(batch, self.target, [] if self.target is None else [self.target])
        return batch if self.target is None else batch[self.target]

    def _rows(self, batch: Data | HeteroData) -> Tensor:
        out = self(batch)
        if self.target is not None and self.target not in out:
            raise ValueError(f"the model returns no outputs for {self.target!r}, only for {', '.join(out)}")
        rows: Tensor = out if self.target is None else out[self.target]
        return rows

    def _step(self, batch: Data | HeteroData, stage: str) -> tuple[Tensor, int | Tensor]:
        store = self._predicted(batch)
        if "batch_size" not in store and any("input_id" in edges for edges in batch.edge_stores):
            raise ValueError(
                f"the {stage} batch is a mini-batch of edges, without seed nodes: train LinkPredictor on it, or "
                "sample nodes (NeighborDataModule)"
            )
        nodes = _labeled_nodes(store, stage)
        y = store.get("y")
        if y is None:
            raise ValueError(f"the batch has no labels 'y', only {sorted(store.keys())}")
        labels = self._labels(y, nodes, stage)
        rows = self._rows(batch)
        # Outputs may be memory-mapped; only the selected rows are copied to the device of the labels.
        rows = rows[nodes if isinstance(nodes, slice) else nodes.to(rows.device)].to(labels.device)
        self._check_rows(rows, labels)
        metric: Metric = getattr(self, f"{stage}_{self.metric_name}")
        metric.update(rows.detach(), labels)
        name, size = f"{stage}_{self.metric_name}", labels.size(0)
        self.log(name, metric, on_step=False, on_epoch=True, prog_bar=True, batch_size=size)
        if stage != "train" and self.metric_names:
            self._log_named(stage, rows.detach(), labels)
        weights = self._weights(labels)
        loss = self._log_loss(stage, self._compute_losses(rows, labels), weights)
        return loss, size if weights is None else weights.sum()

    def _log_named(self, stage: str, rows: Tensor, labels: Tensor) -> None:
        scores, ranked = self._to_scores(rows), self._to_ranked(rows)
        for name in self.metric_names:
            metric: Metric = getattr(self, f"{stage}_{name}")
            is_top, is_curve = isinstance(metric, TopAccuracy), isinstance(metric, RankedByOutputs)
            metric.update(rows if is_top else ranked if is_curve else scores, labels)
            self.log(f"{stage}_{name}", metric, on_step=False, on_epoch=True, batch_size=labels.size(0))


def _labeled_nodes(batch: Any, stage: str) -> slice | Tensor:
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
    count = mask.numel() if batch.num_nodes is None else batch.num_nodes  # unknown without x, which forward names
    if mask.dtype != torch.bool or mask.dim() != 1 or mask.size(0) != count:
        raise ValueError(
            f"{stage}_mask must be a bool tensor [{count}], got {mask.dtype} {list(mask.shape)}; "
            f"select one column of several splits"
        )
    nodes: Tensor = mask.nonzero().view(-1)
    if nodes.numel() == 0:
        raise ValueError(f"{stage}_mask selects none of the {batch.num_nodes} nodes")
    return nodes

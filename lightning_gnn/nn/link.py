"""LightningModule for link prediction, on link-sampled mini-batches and on full graphs."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC

from lightning_gnn.nn.embeddings import TypeEmbeddings
from lightning_gnn.nn.metrics import RankedByOutputs, WeightedMean, mean_ranks
from lightning_gnn.nn.module import GNNModule

_TOP = re.compile(r"(?:hits|recall)@([1-9]\d*)")


class LinkPredictor(GNNModule):
    """Trains a PyG model so that the dot product of two nodes' outputs predicts whether they are linked.

    The loss is binary cross-entropy with the dot product as logit (the graph auto-encoder of Kipf and Welling, 2016,
    arXiv:1611.07308). It works on the batches of PyG's ``LinkNeighborLoader`` and on full graphs (``RandomLinkSplit``):

    - binary: ``edge_label_index`` ``[2, P]`` int64 and ``edge_label`` ``[P]``, 1 for links and 0 for negatives;
    - triplet: ``src_index`` ``[P]``, ``dst_pos_index`` ``[P]`` and ``dst_neg_index`` ``[P]`` or ``[P, K]``, int64.

    Logged values, weighted by the number of labeled edges: ``train_loss`` (``train_loss_step``,
    ``train_loss_epoch``), ``val_loss``, ``test_loss`` and the ``metrics``, which are exact; ``"auc"`` stores an epoch's
    scores in memory. All others rank each link among its K negatives, which have the same source. They need triplets,
    ``neg_sampling=NegativeSampling("triplet", amount=K)``, and no labels. Dot products are computed and compared in
    float32 at least, also where the model runs in 16 bits. Among equal scores, the rank is the mean of the best and the
    worst one, as in OGB's evaluators, and a NaN ranks last. Checkpoints do not contain the model object:
    ``LinkPredictor.load_from_checkpoint(path, model=model)``.
    :class:`~lightning_gnn.nn.GNNModule` documents the other arguments.

    Args:
        model: Maps ``x`` ``[N, F]`` and ``edge_index`` ``[2, E]`` to node embeddings ``[N, D]``.
        target: The edge type to predict, ``(source, name, target)``, for heterogeneous graphs.
        metrics: Validation and test metrics: ``"auc"``, ``"mrr"`` (mean reciprocal rank), ``"hits@10"``,
            ``"recall@10"`` with any number; logged as ``val_auc``, ``val_mrr``, ``val_hits@10``. As each
            ranking has one link, its hits and recall are equal.

    Raises:
        ValueError: An argument is out of range; at the first batch: features or labeled edges are missing, empty or
            have a wrong shape, or a label is neither 0 nor 1.
    """

    gathers_endpoints = True
    """Whether the module calls ``batch.gather_endpoints`` if ranks share the nodes of a graph (``ascend_hybrid``)."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., Any] | None = None,
        target: EdgeType | None = None,
        metrics: Sequence[str] = ("auc",),
        embeddings: TypeEmbeddings | None = None,
    ) -> None:
        super().__init__(model, lr, weight_decay, optimizer, scheduler, embeddings)
        self.target = None if target is None else tuple(target)
        metrics = [metrics] if isinstance(metrics, str) else list(metrics)
        # Exclude objects, so that checkpoints can be loaded with weights_only=True.
        self.save_hyperparameters(ignore=["model", "optimizer", "scheduler", "embeddings"])
        self.metric_names = metrics
        for stage in ("val", "test"):
            for name in metrics:
                setattr(self, f"{stage}_{name}", _create_metric(name))

    def training_step(self, batch: Data | HeteroData, batch_idx: int) -> Tensor:
        """Return the mean binary cross-entropy of the batch's labeled edges."""
        losses, _, _ = self._step(batch, "train")
        return self._log_loss("train", losses)

    def validation_step(self, batch: Data | HeteroData, batch_idx: int) -> None:
        """Log the loss and the metrics of the batch's labeled edges."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Data | HeteroData, batch_idx: int) -> None:
        """Log the loss and the metrics of the batch's labeled edges."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Data | HeteroData, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the logits ``[P]`` of ``edge_label_index``, or ``[P + P * K]`` of the positive, then negative pairs.

        ``sigmoid()`` converts them to probabilities. Labels are not required.
        """
        source, target, _ = self._get_pairs(batch)
        return self._score_pairs(batch, source, target)

    def _evaluate(self, batch: Data | HeteroData, stage: str) -> None:
        losses, scores, labels = self._step(batch, stage)
        self._log_loss(stage, losses)
        scores = scores.detach()
        ranked = [name for name in self.metric_names if name != "auc"]
        ranks = self._rank_links(batch, scores, ranked[0]) if ranked else None
        for name in self.metric_names:
            metric: Metric = getattr(self, f"{stage}_{name}")
            if name == "auc":
                metric.update(scores, labels.long())
            else:
                assert ranks is not None
                metric.update(_reward(name, ranks))
            size, shown = scores.size(0), stage == "val" or name == "auc"
            self.log(f"{stage}_{name}", metric, on_step=False, on_epoch=True, prog_bar=shown, batch_size=size)

    def _rank_links(self, batch: Data | HeteroData, scores: Tensor, name: str) -> Tensor:
        """Return the rank of each link among its negatives, ``[P]``; ``scores`` are those of links, then negatives."""
        source, *_ = self._get_stores(batch)[1:]
        links = source.get("src_index")
        if links is None:
            raise ValueError(
                f"{name} ranks a link among negatives of the same source, which the batch does not contain; "
                'give the DataModule neg_sampling=NegativeSampling("triplet", amount=…), and no labels'
            )
        count = links.size(0)
        return mean_ranks(scores[:count], scores[count:].view(count, -1))

    def _step(self, batch: Data | HeteroData, stage: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, logit and label of each labeled edge, ``[P]``."""
        source, target, labels = self._get_pairs(batch)
        if labels is None:
            raise ValueError(
                "the batch has 'edge_label_index' but no 'edge_label': give the loader labels or neg_sampling, "
                "since training needs negatives as well"
            )
        if source.numel() == 0:
            raise ValueError(f"the {stage} batch has no labeled edges")
        if labels.shape != source.shape:
            raise ValueError(f"edge_label must be [{source.size(0)}], one per labeled edge, got {list(labels.shape)}")
        if self._must_check(stage, labels):
            wrong = labels[(labels != 0) & (labels != 1)]
            if wrong.numel() > 0:
                raise ValueError(
                    f"edge_label holds {wrong[0].item()}, but must be 0 or 1 (LinkNeighborLoader adds 1 to labels that "
                    f"contain 0 when it also samples negatives: give it no labels, or ones)"
                )
        scores = self._score_pairs(batch, source, target)
        labels = labels.to(scores.dtype)
        return F.binary_cross_entropy_with_logits(scores, labels, reduction="none"), scores, labels

    def _score_pairs(self, batch: Data | HeteroData, source: Tensor, target: Tensor) -> Tensor:
        z = self(batch)
        if self.target is None and (gather := batch.get("gather_endpoints")) is not None:
            z = gather(z)  # from this rank's nodes to those of its labeled edges
        left, right = (z, z) if self.target is None else (z[self.target[0]], z[self.target[-1]])
        # Products in 16 bits would round different scores to ties.
        dtype = torch.promote_types(left.dtype, torch.float32)
        ends = left[source.to(left.device)].to(dtype), right[target.to(right.device)].to(dtype)
        scores: Tensor = (ends[0] * ends[1]).sum(dim=-1)
        return scores.to(source.device)

    def _get_stores(self, batch: Data | HeteroData) -> tuple[Any, Any, Any]:
        """Return the stores of the labeled edges, of their sources and of their targets."""
        self._check_types(batch, self.target, [] if self.target is None else [self.target[0], self.target[-1]])
        if self.target is None:
            return batch, batch, batch
        return batch[self.target], batch[self.target[0]], batch[self.target[-1]]

    def _get_pairs(self, batch: Data | HeteroData) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the sources, targets (``[P]`` local node ids) and labels of the labeled edges."""
        edges, sources_of, targets_of = self._get_stores(batch)
        if edges.get("edge_label_index") is not None:
            index = edges.edge_label_index
            if index.dim() != 2 or index.size(0) != 2:
                raise ValueError(f"edge_label_index must be [2, P], got {list(index.shape)}")
            return index[0], index[1], edges.get("edge_label")
        triplet = [sources_of.get("src_index"), *(targets_of.get(name) for name in ("dst_pos_index", "dst_neg_index"))]
        if any(part is None for part in triplet):
            raise ValueError(
                "the batch has no labeled edges: neither 'edge_label_index' nor 'src_index', 'dst_pos_index' and "
                f"'dst_neg_index', only {sorted(edges.keys())}"
            )
        source, positive, negative = triplet
        negative = negative.view(source.size(0), -1)
        sources = torch.cat([source, source.repeat_interleave(negative.size(1))])
        labels = torch.zeros(sources.size(0), device=source.device)
        labels[: source.size(0)] = 1.0
        return sources, torch.cat([positive, negative.flatten()]), labels


class _AUC(RankedByOutputs, BinaryAUROC):
    """The area under the ROC curve of logits."""


def _create_metric(name: str) -> Metric:
    """Build a metric from its name."""
    if name == "auc":
        return _AUC(validate_args=False)
    if name != "mrr" and _TOP.fullmatch(name) is None:
        raise ValueError(f"metrics: {name!r} is unknown; use auc, mrr, hits@10 or recall@10 with any number")
    return WeightedMean()


def _reward(name: str, ranks: Tensor) -> Tensor:
    """Return the value of each link, ``[P]``, whose mean is the metric."""
    match = _TOP.fullmatch(name)
    return 1 / ranks if match is None else (ranks <= int(match[1])).to(ranks.dtype)

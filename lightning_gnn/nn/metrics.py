"""Metrics of predictions: ranks among equal scores, and those of nodes by name, as torchmetrics classes."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import MeanSquaredError, Metric, R2Score
from torchmetrics import classification as of_classes

MetricTask = Literal["multiclass", "multilabel", "regression"]
_AVERAGED = {
    "acc": "Accuracy",
    "f1": "F1Score",
    "precision": "Precision",
    "recall": "Recall",
    "auroc": "AUROC",
    "ap": "AveragePrecision",
}
_OGBN = ("ogbn-arxiv", "ogbn-mag", "ogbn-papers100M", "ogbn-products")  # OGB's evaluators compute the accuracy
_OTHERS: dict[str, dict[str, Callable[..., Metric]]] = {
    "multiclass": {
        "mcc": of_classes.MulticlassMatthewsCorrCoef,
        "kappa": of_classes.MulticlassCohenKappa,
        "ece": of_classes.MulticlassCalibrationError,
        **dict.fromkeys(_OGBN, partial(of_classes.MulticlassAccuracy, average="micro")),
    },
    "multilabel": {"exact": of_classes.MultilabelExactMatch},
    "regression": {
        "mse": MeanSquaredError,
        "rmse": partial(MeanSquaredError, squared=False),
        "r2": R2Score,
    },
}


def mean_ranks(scores: Tensor, others: Tensor) -> Tensor:
    """Return the rank of each score among others, floating ``[P]``, from 1 on; equal scores share their mean rank.

    This is the mean of the optimistic and the pessimistic rank, as in OGB's evaluators (Hu et al., 2020,
    arXiv:2005.00687). A score that is NaN, or is compared with one, counts as the lower of the two.

    Args:
        scores: Scores to rank, floating ``[P]``; higher is better.
        others: The scores that each is ranked among, floating ``[P, K]``.
    """
    scores = scores.unsqueeze(1)
    # Comparisons with NaN are false, so negate those that would rank it first.
    above, not_below = ~(others <= scores), ~(others < scores)
    return 1 + (above.sum(1) + not_below.sum(1)).to(torch.float32) / 2


class WeightedMean(Metric):
    """Sum of values divided by the sum of weights, by default their number.

    Unlike torchmetrics' mean, it passes a NaN on to EarlyStopping and the user without a device synchronization, and
    does not round values to the Trainer's precision.
    """

    values: Tensor
    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", torch.zeros((), dtype=torch.float32), "sum")
        self.add_state("weights", torch.zeros((), dtype=torch.float32), "sum")

    def update(self, values: Tensor, weights: Tensor | None = None) -> None:
        """Add values, ``[n]``, which are already multiplied by their weights, ``[n]``."""
        self.values += values.sum(dtype=self.values.dtype)
        self.weights += values.numel() if weights is None else weights.sum(dtype=self.weights.dtype)

    def compute(self) -> Tensor:
        """Return the mean; NaN without values."""
        return self.values / self.weights


class RankedByOutputs:
    """Mixin for torchmetrics' curves over outputs of any size, which it would squash into (0, 1), and round to ties."""

    preds: list[Tensor]
    target: list[Tensor]

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Store the outputs, at least in float32, and the labels."""
        self.preds.append(preds.to(torch.promote_types(preds.dtype, torch.float32)))
        self.target.append(target)


class _MulticlassAUROC(RankedByOutputs, of_classes.MulticlassAUROC):
    """The area under the ROC curve of each class."""


class _MulticlassAveragePrecision(RankedByOutputs, of_classes.MulticlassAveragePrecision):
    """The average precision of each class."""


class _MultilabelAUROC(RankedByOutputs, of_classes.MultilabelAUROC):
    """The area under the ROC curve of each label."""


class _MultilabelAveragePrecision(RankedByOutputs, of_classes.MultilabelAveragePrecision):
    """The average precision of each label."""


class TopAccuracy(WeightedMean):
    """The fraction of nodes whose class is among the k with the highest logits, by :func:`mean_ranks`."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k

    def update(self, logits: Tensor, classes: Tensor) -> None:  # type: ignore[override]
        """Add nodes, with logits floating ``[n, C]`` and classes int64 ``[n]``."""
        own = classes.unsqueeze(1)
        others = torch.ones_like(logits, dtype=torch.bool).scatter_(1, own, False)
        ranks = mean_ranks(logits.gather(1, own).squeeze(1), logits[others].view(len(logits), -1))
        super().update((ranks <= self.top_k).to(ranks.dtype))


def log_odds(logits: Tensor) -> Tensor:
    """Return the logarithm of p / (1 - p) of each class, ``[n, C]``, up to a constant, in the order of p.

    Probabilities near 0 and 1 would be rounded to ties. ``logits`` are float32 ``[n, C]``, with C at least 2.
    """
    others = logits.size(1) - 1
    is_top = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.argmax(1, keepdim=True), True)
    # The logarithm of the mean of the other classes' exponentials, relative to the highest of these classes.
    top = logits.amax(1, keepdim=True)
    below = logits.masked_fill(is_top, -torch.inf).amax(1, keepdim=True)
    rises = (logits - top).expm1()
    of_others = top + ((rises.sum(1, keepdim=True) - rises) / others).log1p()
    of_below = below + ((logits - below).expm1().masked_fill(is_top, 0.0).sum(1, keepdim=True) / others).log1p()
    return logits - torch.where(is_top, of_below, of_others)


_RANKED: dict[str, Callable[..., Metric]] = {
    "MulticlassAUROC": _MulticlassAUROC,
    "MulticlassAveragePrecision": _MulticlassAveragePrecision,
    "MultilabelAUROC": _MultilabelAUROC,
    "MultilabelAveragePrecision": _MultilabelAveragePrecision,
}


def named_metric(name: str, kind: MetricTask, num_outputs: int = 1) -> Metric:
    """Build a metric from its name.

    ``"multiclass"``: ``top5`` (:class:`TopAccuracy`, with any number); ``macro_`` (mean over classes) or ``weighted_``
    (by the nodes of each class) with ``f1``, ``acc``, ``precision``, ``recall``, ``auroc`` and ``ap`` (average
    precision); ``mcc`` (Matthews correlation coefficient), ``kappa`` (Cohen's), ``ece`` (expected calibration error);
    ``ogbn-arxiv`` and other OGB datasets, as OGB's evaluator. ``"multilabel"``: the same averages and ``micro_``;
    ``exact``, the fraction of nodes with all labels correct. ``"regression"``: ``mse``, ``rmse``, ``r2``.
    """
    options: dict[str, Any] = {}
    if kind != "regression":
        # The module checks the labels of a batch.
        options = {"num_classes" if kind == "multiclass" else "num_labels": num_outputs, "validate_args": False}
    if build := _OTHERS[kind].get(name):
        return build(**options)
    if kind == "multiclass" and (match := re.fullmatch(r"top([1-9]\d*)", name)) and int(match[1]) <= num_outputs:
        return TopAccuracy(int(match[1]))
    average, _, score = name.partition("_")
    averages = ["macro", "weighted", *["micro"] * (kind == "multilabel")]
    if kind != "regression" and score in _AVERAGED and average in averages:
        class_name = f"{kind.title()}{_AVERAGED[score]}"
        build = _RANKED.get(class_name) or getattr(of_classes, class_name)
        return build(average=average, **options)
    raise ValueError(f"metrics: {name!r} is unknown; use {_list_names(kind, num_outputs)}")


def _list_names(kind: MetricTask, num_outputs: int) -> str:
    others = ", ".join(_OTHERS[kind])
    if kind == "regression":
        return others
    averages = "macro_ or weighted_" if kind == "multiclass" else "micro_, macro_ or weighted_"
    tops = f"top1 to top{num_outputs}, " if kind == "multiclass" else ""
    return f"{tops}{averages} with {', '.join(_AVERAGED)}; {others}"

"""Metrics of node predictions by name, as torchmetrics classes."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

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


def named_metric(name: str, kind: MetricTask, num_outputs: int = 1) -> Metric:
    """Build a metric from its name.

    ``"multiclass"``: ``top5`` (top-k accuracy, with any number); ``macro_`` (mean over classes) or ``weighted_`` (by
    the nodes of each class) with ``f1``, ``acc``, ``precision``, ``recall``, ``auroc`` and ``ap`` (average precision);
    ``mcc`` (Matthews correlation coefficient), ``kappa`` (Cohen's), ``ece`` (expected calibration error);
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
        return of_classes.MulticlassAccuracy(top_k=int(match[1]), average="micro", **options)
    average, _, score = name.partition("_")
    averages = ["macro", "weighted", *["micro"] * (kind == "multilabel")]
    if kind != "regression" and score in _AVERAGED and average in averages:
        metric: Metric = getattr(of_classes, f"{kind.title()}{_AVERAGED[score]}")(average=average, **options)
        return metric
    raise ValueError(f"metrics: {name!r} is unknown; use {_list_names(kind, num_outputs)}")


def _list_names(kind: MetricTask, num_outputs: int) -> str:
    others = ", ".join(_OTHERS[kind])
    if kind == "regression":
        return others
    averages = "macro_ or weighted_" if kind == "multiclass" else "micro_, macro_ or weighted_"
    tops = f"top1 to top{num_outputs}, " if kind == "multiclass" else ""
    return f"{tops}{averages} with {', '.join(_AVERAGED)}; {others}"

"""Metrics of predictions for nodes, by name: torchmetrics' classes, and OGB's evaluators."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import MeanSquaredError, Metric, R2Score
from torchmetrics import classification as of_classes
from torchmetrics.utilities.data import dim_zero_cat

Kind = Literal["multiclass", "multilabel", "regression"]
_AVERAGED = {
    "acc": "Accuracy",
    "f1": "F1Score",
    "precision": "Precision",
    "recall": "Recall",
    "auroc": "AUROC",
    "ap": "AveragePrecision",
}
_OTHERS: dict[str, dict[str, Callable[..., Metric]]] = {
    "multiclass": {
        "mcc": of_classes.MulticlassMatthewsCorrCoef,
        "kappa": of_classes.MulticlassCohenKappa,
        "ece": of_classes.MulticlassCalibrationError,
    },
    "multilabel": {"exact": of_classes.MultilabelExactMatch},
    "regression": {
        "mse": MeanSquaredError,
        "rmse": partial(MeanSquaredError, squared=False),
        "r2": R2Score,
    },
}


def named_metric(name: str, kind: Kind, num_outputs: int = 1) -> Metric:
    """Build a metric from its name.

    Of one class per node (``"multiclass"``): ``top5``, the share of nodes whose class is among the five likeliest, with
    any number; ``macro_f1``, the mean over the classes, and ``weighted_f1``, by the nodes of each class, likewise with
    ``acc``, ``precision``, ``recall``, ``auroc`` and ``ap`` (average precision); ``mcc`` (Matthews' correlation),
    ``kappa`` (Cohen's), ``ece`` (expected calibration error). Of several labels: the same averages, and ``micro_``;
    ``exact``, the share of nodes with all labels right. Of numbers: ``mse``, ``rmse``, ``r2``. Of classes and labels
    also an evaluator of OGB by the name of its data set, such as ``ogbn-arxiv``; it keeps an epoch's outputs in memory.

    Examples:
        >>> import torch
        >>> from lightning_gnn.nn.metrics import named_metric
        >>> probabilities = torch.tensor([[0.5, 0.4, 0.1], [0.2, 0.3, 0.5]])
        >>> named_metric("top2", "multiclass", 3)(probabilities, torch.tensor([1, 0]))
        tensor(0.5000)
    """
    if name.startswith("ogbn-") and kind != "regression":
        return OGBMetric(name)
    options: dict[str, Any] = {}
    if kind != "regression":
        # Labels are checked by whoever takes them from a batch.
        options = {"num_classes" if kind == "multiclass" else "num_labels": num_outputs, "validate_args": False}
    if build := _OTHERS[kind].get(name):
        return build(**options)
    if kind == "multiclass" and (found := re.fullmatch(r"top([1-9]\d*)", name)) and int(found[1]) <= num_outputs:
        return of_classes.MulticlassAccuracy(top_k=int(found[1]), average="micro", **options)
    average, _, score = name.partition("_")
    averages = ["macro", "weighted", *["micro"] * (kind == "multilabel")]
    if kind != "regression" and score in _AVERAGED and average in averages:
        metric: Metric = getattr(of_classes, f"{kind.title()}{_AVERAGED[score]}")(average=average, **options)
        return metric
    raise ValueError(f"metrics: {name!r} is unknown; use {_known(kind, num_outputs)}")


def _known(kind: Kind, num_outputs: int) -> str:
    others = ", ".join(_OTHERS[kind])
    if kind == "regression":
        return others
    averages = "macro_ or weighted_" if kind == "multiclass" else "micro_, macro_ or weighted_"
    tops = f"top1 to top{num_outputs}, " if kind == "multiclass" else ""
    return f"{tops}{averages} with {', '.join(_AVERAGED)}; {others}; or OGB's, such as ogbn-arxiv"


class OGBMetric(Metric):
    """The evaluator of a node data set of OGB (arXiv:2005.00687), as a metric.

    Args:
        name: Name of the data set, such as ``"ogbn-arxiv"``.
    """

    full_state_update = False
    higher_is_better = True
    outputs: list[Tensor]
    labels: list[Tensor]

    def __init__(self, name: str) -> None:
        super().__init__()
        try:
            from ogb.nodeproppred import Evaluator
        except ImportError as error:
            raise ModuleNotFoundError(
                f"metrics: {name} is an evaluator of OGB's: pip install 'lightning-gnn[ogb]' ({error})"
            ) from error
        self._evaluator = Evaluator(name=name)
        self.add_state("outputs", [], "cat")
        self.add_state("labels", [], "cat")

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Keep outputs ``[n, C]`` and labels, ``[n]`` or ``[n, C]``."""
        ranked = self._evaluator.eval_metric != "acc"
        self.outputs.append(outputs.float() if ranked else outputs.argmax(1, keepdim=True))
        self.labels.append(labels.view(labels.size(0), -1))

    def compute(self) -> Tensor:
        """Return what the evaluator says of all."""
        parts = {"y_true": self.labels, "y_pred": self.outputs}
        given = {key: dim_zero_cat(values).cpu().numpy() for key, values in parts.items()}
        return torch.tensor(float(self._evaluator.eval(given)[self._evaluator.eval_metric]), device=self.device)

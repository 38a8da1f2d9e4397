"""Weights of the ranks' losses, and detection of losses that must not be weighted by seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, Literal

from torch import Tensor
from torch.autograd.graph import Node

Weight = float | Literal["sum"]
"""Weight of a loss relative to those of the other trainers; ``"sum"``: losses are sums, added without weights."""
LOSS_CHECKS = 16
"""Number of mini-batches in which to check for losses that need a weight."""


def get_loss(output: object) -> Tensor | None:
    """Return the scalar loss in the output of ``training_step`` if it requires a gradient, otherwise None."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad else None


def get_weight(output: object) -> Weight | Tensor | None:
    """Return the ``"weight"`` in the output of ``training_step``, or None; a device tensor is not validated."""
    weight = output.get("weight") if isinstance(output, Mapping) else None
    if weight is None:
        return None
    if isinstance(weight, str) and weight == "sum":
        return "sum"
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(
                f"the weight returned by training_step must be one number, but has the shape {list(weight.shape)}"
            )
        if not weight.is_cpu:
            return weight.detach().reshape(())
    elif not isinstance(weight, Real):
        raise TypeError(
            "the weight returned by training_step must be a number, a tensor of one number or 'sum', but is "
            f"{type(weight).__name__ if not isinstance(weight, str) else repr(weight)}"
        )
    return check_weight(float(weight))


def check_weight(weight: float) -> float:
    """Return the weight; raise ValueError unless it is finite and not negative."""
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"the weight returned by training_step must be finite and not negative, but is {weight:g}")
    return weight


def check_consistent(none: int, numbers: int, sums: int) -> None:
    """Raise ValueError unless all losses came without a weight, all with a number, or all with ``"sum"``."""
    if (none > 0) + (numbers > 0) + (sums > 0) > 1:
        raise ValueError(
            "training_step must return the same type of weight on all ranks, but of the trainers of an iteration "
            f"{numbers} returned a number, {sums} returned 'sum' and {none} returned no weight"
        )


def explain_weighting(loss: Tensor, count: int | None = None) -> str | None:
    """Return the reason why a loss cannot be a mean over the seeds, or None if it may be one."""
    # Recognizes only losses of torch.nn.functional in the autograd graph, and only if no later operation could turn
    # them into such a mean. Must run before the backward pass, which frees the saved tensors.
    for node, is_scaled, is_summed in _find_losses(loss.grad_fn):
        try:
            reason = _explain_node(node, is_scaled, is_summed, count)
        except RuntimeError:  # a saved tensor was modified or freed; the backward pass will report it
            continue
        if reason is not None:
            return reason
    return None


_FUNCTIONS = {
    "NllLossBackward0": "cross_entropy or nll_loss",
    "NllLoss2DBackward0": "cross_entropy or nll_loss",
    "BinaryCrossEntropyBackward0": "binary_cross_entropy",
    "BinaryCrossEntropyWithLogitsBackward0": "binary_cross_entropy_with_logits",
    "MseLossBackward0": "mse_loss",
    "SmoothL1LossBackward0": "smooth_l1_loss",
    "HuberLossBackward0": "huber_loss",
    "MultiMarginLossBackward0": "multi_margin_loss",
    "MultilabelMarginLossBackward0": "multilabel_margin_loss",
}
_ADDING = ("AddBackward0", "SubBackward0", "CloneBackward0", "ToCopyBackward0")
_SCALING = ("MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1", "NegBackward0")
_NONE, _MEAN, _SUM = 0, 1, 2  # torch's reduction codes


def _find_losses(root: Node | None) -> Iterator[tuple[Node, bool, bool]]:
    """Yield the loss functions in an autograd graph, and whether their results were scaled and summed."""
    nodes = [] if root is None else [(root, False, False)]
    seen = set()
    while nodes:
        node, scaled, summed = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name in _FUNCTIONS:
            yield node, scaled, summed
        elif name in _ADDING or name in _SCALING or (name == "SumBackward0" and not summed):
            scaled, summed = scaled or name in _SCALING, summed or name == "SumBackward0"
            nodes += [(following, scaled, summed) for following, _ in node.next_functions if following is not None]


def _explain_node(node: Any, is_scaled: bool, is_summed: bool, count: int | None) -> str | None:
    function, reduction = _FUNCTIONS[node.name()], node._saved_reduction
    if reduction == _SUM or (reduction == _NONE and is_summed):
        # A penalty on parameters is equal on all trainers.
        is_penalty = all(after is None or not after.next_functions for after, _ in node.next_functions)
        return None if is_scaled or is_penalty else f"{function} is summed (reduction='sum')"
    if reduction != _MEAN or is_summed or not node.name().startswith("NllLoss"):
        return None
    weight, target = node._saved_weight, node._saved_target
    if weight is not None and bool((weight != weight[0]).any()):
        return f"{function} has class weights (weight=...) and is divided by their sum"
    ignored = node._saved_ignore_index
    ignored -= 2**64 if ignored >= 2**63 else 0
    if (num_ignored := int((target == ignored).sum())) > 0:
        return f"{function} ignores {num_ignored} of {target.numel()} labels (ignore_index={ignored})"
    if count is not None and 0 < target.numel() < count:
        return f"{function} has labels for {target.numel()} of the {count} seeds"
    return None


def format_warning(reason: str, ranks: str, unit: str) -> str:
    """Return the warning about a loss that needs a weight."""
    return (
        f"the loss is not a mean over {unit}: {reason}. The losses of {ranks} are weighted by their numbers of {unit}, "
        "so the gradients differ from those of one device; let training_step return {'loss': loss, 'weight': weight} "
        "(with automatic optimization), where weight is the divisor of the loss: the number of counted labels or the "
        "sum of their class weights; or 'sum' if the loss was not divided"
    )

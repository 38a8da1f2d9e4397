"""Losses of a mini-batch that several ranks share: what each weighs, and which a count of seeds does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, Literal

from torch import Tensor
from torch.autograd.graph import Node

Weight = float | Literal["sum"]
"""What a loss weighs among those of the other trainers; ``"sum"``: losses are sums, which are added as they are."""
LOSS_CHECKS = 16
"""In how many mini-batches to look for losses that need a weight."""


def returned_loss(output: object) -> Tensor | None:
    """Return the loss of one number in what ``training_step`` returned, if it has gradients."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad else None


def returned_weight(output: object) -> Weight | Tensor | None:
    """Return the ``"weight"`` in what ``training_step`` returned, None without; a tensor on a device is not checked."""
    weight = output.get("weight") if isinstance(output, Mapping) else None
    if weight is None:
        return None
    if isinstance(weight, str) and weight == "sum":
        return "sum"
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(
                f"the weight that training_step returns must be one number, but has the shape {list(weight.shape)}"
            )
        if not weight.is_cpu:
            return weight.detach().reshape(())
    elif not isinstance(weight, Real):
        raise TypeError(
            "the weight that training_step returns must be a number, a tensor of one number or 'sum', but is "
            f"{type(weight).__name__ if not isinstance(weight, str) else repr(weight)}"
        )
    return check_weight(float(weight))


def check_weight(weight: float) -> float:
    """Return a weight that is finite and not negative."""
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"the weight that training_step returns must be finite and not negative, but is {weight:g}")
    return weight


def check_same_kind(none: int, numbers: int, sums: int) -> None:
    """Refuse weights of several kinds among so many losses that came without, with a number, and with ``"sum"``."""
    if (none > 0) + (numbers > 0) + (sums > 0) > 1:
        raise ValueError(
            "training_step must return a weight always or never, and of one kind, but of the trainers of an "
            f"iteration {numbers} returned a number, {sums} 'sum' and {none} none"
        )


def weighs_otherwise(loss: Tensor, count: int | None = None) -> str | None:
    """Say why a loss is certainly no mean over the seeds, None where it may be one."""
    # Only losses of torch.nn.functional that autograd knows are recognized, and only where nothing after them could
    # make such a mean. To be called before the backward pass, which frees what this looks at.
    for node, scaled, summed in _losses_in(loss.grad_fn):
        try:
            why = _why(node, scaled, summed, count)
        except RuntimeError:  # what was saved has been overwritten or freed, which the backward pass will report
            continue
        if why is not None:
            return why
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
_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers of reductions


def _losses_in(root: Node | None) -> Iterator[tuple[Node, bool, bool]]:
    """Yield the losses of which this is made; whether they were scaled on the way, and whether summed."""
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


def _why(node: Any, scaled: bool, summed: bool, count: int | None) -> str | None:
    function, reduction = _FUNCTIONS[node.name()], node._saved_reduction
    if reduction == _SUM or (reduction == _NONE and summed):
        # Of parameters, as a penalty is, it is the same in all trainers.
        of_parameters = all(after is None or not after.next_functions for after, _ in node.next_functions)
        return None if scaled or of_parameters else f"{function} is summed (reduction='sum')"
    if reduction != _MEAN or summed or not node.name().startswith("NllLoss"):
        return None
    weight, target = node._saved_weight, node._saved_target
    if weight is not None and bool((weight != weight[0]).any()):
        return f"{function} has class weights (weight=...), and is divided by their sum"
    ignored = node._saved_ignore_index
    ignored -= 2**64 if ignored >= 2**63 else 0
    if (hit := int((target == ignored).sum())) > 0:
        return f"{function} ignores {hit} of {target.numel()} labels (ignore_index={ignored})"
    if count is not None and 0 < target.numel() < count:
        return f"{function} has labels of {target.numel()} of the {count} seeds"
    return None


def warning_of(why: str, who: str, what: str) -> str:
    """Return the warning about a loss that needs a weight."""
    return (
        f"the loss is no mean over {what}: {why}. The losses of {who} are weighted by their numbers of {what}, so that "
        "the gradients differ from those of one device; let training_step return {'loss': loss, 'weight': weight} "
        "(with automatic optimization), where weight is what the loss was divided by: the number of labels that "
        "count, or the sum of their class weights; and 'sum' for a loss that was not divided"
    )

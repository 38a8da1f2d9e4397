"""Which negative edges a user asks for, in any of PyG's ways to say it."""

from __future__ import annotations

import copy
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

_MOST_WEIGHTS = 1 << 24
"""As many outcomes torch.multinomial draws from at most."""


def negatives(
    neg_sampling: Any = None, neg_sampling_ratio: Any = None, num_nodes: int = 0, where: str = ""
) -> NegativeSampling | None:
    """Return PyG's description of the negative edges, None for none.

    Args:
        neg_sampling: A mode, a dictionary or a ``NegativeSampling``.
        neg_sampling_ratio: Instead, how many negatives to draw per edge; 0 for none.
        num_nodes: Number of nodes, to each of which weights must belong.
        where: What a message begins with.

    Raises:
        TypeError: Neither of these.
        ValueError: Both are given, an unknown mode, no positive amount, or weights that are no probabilities.
    """
    if neg_sampling_ratio is not None:
        if neg_sampling is not None:
            raise ValueError(f"{where}give neg_sampling or neg_sampling_ratio, not both")
        if not isinstance(neg_sampling_ratio, Real) or isinstance(neg_sampling_ratio, bool):
            raise TypeError(f"{where}neg_sampling_ratio must be a number, but is {neg_sampling_ratio!r}")
        ratio = float(neg_sampling_ratio)
        if not 0 <= ratio < float("inf"):
            raise ValueError(f"{where}neg_sampling_ratio must not be negative, but is {ratio:g}")
        neg_sampling = NegativeSampling("binary", ratio) if ratio else None
    if neg_sampling is None:
        return None
    try:
        found = NegativeSampling.cast(neg_sampling)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{where}neg_sampling={neg_sampling!r} is none: {error}; use 'binary' or 'triplet', or a "
            "torch_geometric.sampler.NegativeSampling"
        ) from None
    found = copy.copy(found)
    for name in ("src_weight", "dst_weight"):
        setattr(found, name, _probabilities(getattr(found, name), num_nodes, f"{where}{name}"))
    return found


def _probabilities(weight: Any, num_nodes: int, name: str) -> Tensor | None:
    if weight is None:
        return None
    weight = torch.as_tensor(weight)
    if weight.shape != (num_nodes,):
        raise ValueError(
            f"{name} of the negative sampling must have one entry per node, {num_nodes}, but has the shape "
            f"{list(weight.shape)}"
        )
    if num_nodes > _MOST_WEIGHTS:
        raise ValueError(f"{name} of the negative sampling: torch draws by weight from {_MOST_WEIGHTS} nodes at most")
    if not weight.is_floating_point():
        weight = weight.float()
    wrong = ~weight.isfinite() | (weight < 0)
    if bool(wrong.any()):
        node = int(wrong.nonzero()[0])
        found = f"{weight[node]:g} at node {node}"
        raise ValueError(f"{name} of the negative sampling must not be negative, but is {found}")
    if not bool(weight.sum() > 0):
        raise ValueError(f"{name} of the negative sampling is zero at every node, which leaves none to draw")
    return weight

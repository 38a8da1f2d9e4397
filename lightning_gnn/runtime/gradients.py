"""Means of all ranks' gradients, in one message per dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

AddUp = Callable[[Tensor], object]
"""Replaces a tensor by the sum over all ranks, which call it together."""


class GradientMean:
    """Replaces gradients by their means over the ranks, whichever parameters a rank has used.

    A parameter without a gradient on one rank counts as zero there; without one on any rank, it stays without. Sparse
    gradients (COO) stay so; until one is seen for the first time, its parameter travels as if it were dense.

    Args:
        num_ranks: N.
        add_up: Of the ranks.
    """

    def __init__(self, num_ranks: int, add_up: AddUp = dist.all_reduce) -> None:
        self._num_ranks = num_ranks
        self._add_up = add_up
        self._sparse: set[int] = set()

    def take(self, parameters: Iterable[Tensor], factor: float = 1.0) -> None:
        """Replace the gradients; all ranks call this together.

        Args:
            parameters: In the same order on all ranks; those that require no gradient are left out.
            factor: Of the mean.
        """
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        factor /= self._num_ranks
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, parameter in enumerate(wanted):
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(place)
        for places in by_kind.values():
            self._take_alike([wanted[place] for place in places], places, factor)
        for place in sorted(self._sparse):
            if place < len(wanted):
                self._take_sparse(wanted[place], factor)

    def _take_alike(self, parameters: list[Tensor], places: list[int], factor: float) -> None:
        """Take the dense gradients of parameters of one dtype on one device."""
        known = [(place, p) for place, p in zip(places, parameters, strict=True) if place not in self._sparse]
        if not known:
            return
        kinds = [0 if p.grad is None else 2 if p.grad.is_sparse else 1 for _, p in known]
        first = known[0][1]
        flags = torch.tensor([*(k == 1 for k in kinds), *(k == 2 for k in kinds)], dtype=first.dtype)
        parts = [flags.to(first.device)]
        for kind, (_, parameter) in zip(kinds, known, strict=True):
            held = parameter.grad if kind == 1 else None
            parts.append((torch.zeros_like(parameter) if held is None else held.detach()).reshape(-1))
        flat = torch.cat(parts)
        self._add_up(flat)
        found, *sums = torch.split(flat, [part.numel() for part in parts])
        # Reading the flags waits for the device, so only a rank that misses a dense gradient does.
        dense, sparse = [kind == 1 for kind in kinds], [kind == 2 for kind in kinds]
        if not all(dense):
            dense, sparse = (row.tolist() for row in (found > 0).view(2, -1))
        for (place, parameter), total, has, is_sparse in zip(known, sums, dense, sparse, strict=True):
            if is_sparse:
                self._sparse.add(place)
            elif has and parameter.grad is None:
                parameter.grad = total.view(parameter.shape) * factor
            elif has:
                torch.mul(total.view(parameter.shape), factor, out=parameter.grad)

    def _take_sparse(self, parameter: Tensor, factor: float) -> None:
        gradient = parameter.grad
        if gradient is None:
            index = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            values = parameter.new_empty(0, *parameter.shape[1:]).detach()
            gradient = torch.sparse_coo_tensor(index, values, parameter.shape, check_invariants=False)
        gradient = gradient.coalesce()
        self._add_up(gradient)
        parameter.grad = gradient * factor

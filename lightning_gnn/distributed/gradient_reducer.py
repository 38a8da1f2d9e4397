"""Means of all ranks' gradients, in one message per dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

AllReduce = Callable[[Tensor], object]
"""Replaces a tensor by the sum over all ranks, which call it together."""


class GradientPiggyback(Protocol):
    """Numbers that travel in the message of the gradients, which saves a second collective."""

    def write(self, like: Tensor) -> Tensor:
        """Return integers of at most 255, which every dtype can add up, in the dtype and on the device of a tensor."""
        ...

    def read(self, sums: Tensor) -> float:
        """Take their sums over the ranks; return the factor of the gradients' mean."""
        ...


class GradientReducer:
    """Replaces gradients by their means over the ranks, whichever parameters a rank has used."""

    # A parameter without a gradient on one rank counts as zero there; without one on any rank, it stays without. Sparse
    # gradients (COO) stay so; the first time, their parameter travels as if it were dense.

    def __init__(self, num_ranks: int, all_reduce: AllReduce = dist.all_reduce) -> None:
        self._num_ranks = num_ranks
        self._all_reduce = all_reduce
        self._sparse: dict[int, Tensor] = {}

    @torch.no_grad()  # gradients may have graphs of their own
    def reduce(
        self,
        parameters: Iterable[Tensor],  # in the same order on all ranks; those that require no gradient are left out
        factor: float = 1.0,  # of the means
        piggyback: GradientPiggyback | None = None,
    ) -> None:
        """Replace the gradients. Collective: every rank must call this."""
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for group in by_kind.values():
            found, sums, factor = self._sum_dense(group, factor, piggyback)
            for parameter in self._assign_dense(group, found, sums, factor / self._num_ranks):
                self._reduce_sparse(parameter, factor / self._num_ranks)
            piggyback = None

    def _sum_dense(
        self, parameters: list[Tensor], factor: float, piggyback: GradientPiggyback | None
    ) -> tuple[tuple[list[bool], list[bool]], list[Tensor], float]:
        """Add up the dense gradients of parameters of one dtype on one device."""
        # The message: two flags per parameter, the dense gradients, and what travels with them.
        known = [id(p) in self._sparse for p in parameters]
        kinds = [0 if p.grad is None else 2 if p.grad.is_sparse else 1 for p in parameters]
        flags = torch.tensor([*(k == 1 for k in kinds), *(k == 2 for k in kinds)], dtype=parameters[0].dtype)
        parts = [flags.to(parameters[0].device)]
        for kind, sparse, parameter in zip(kinds, known, parameters, strict=True):
            held = parameter.grad if kind == 1 else None
            if not sparse:
                parts.append((torch.zeros_like(parameter) if held is None else held).reshape(-1))
        if piggyback is not None:
            parts.append(piggyback.write(parts[0]))
        flat = torch.cat(parts)
        self._all_reduce(flat)
        found, *sums = torch.split(flat, [part.numel() for part in parts])
        if piggyback is not None:
            factor = piggyback.read(sums.pop())
        # Reading the flags waits for an accelerator, so there only a rank that misses one does, or has a new kind.
        has_dense, has_sparse = [kind == 1 for kind in kinds], [kind == 2 for kind in kinds]
        if flat.is_cpu or not all(kind == 1 + sparse for kind, sparse in zip(kinds, known, strict=True)):
            has_dense, has_sparse = (row.tolist() for row in (found > 0).view(2, -1))
        return (has_dense, has_sparse), sums, factor

    def _assign_dense(
        self, parameters: list[Tensor], found: tuple[list[bool], list[bool]], sums: list[Tensor], factor: float
    ) -> list[Tensor]:
        """Replace the dense gradients by multiples of the sums; return the parameters with sparse ones."""
        known = [id(p) in self._sparse for p in parameters]
        has_dense, has_sparse = found
        totals = iter(sums)
        for parameter, is_known, dense, sparse in zip(parameters, known, has_dense, has_sparse, strict=True):
            total = None if is_known else next(totals)
            if sparse:
                self._sparse[id(parameter)] = parameter
            elif dense and total is not None and parameter.grad is None:
                parameter.grad = total.view(parameter.shape) * factor
            elif dense and total is not None:
                torch.mul(total.view(parameter.shape), factor, out=parameter.grad)
        some = zip(parameters, has_dense, has_sparse, strict=True)
        return [parameter for parameter, *has in some if id(parameter) in self._sparse and any(has)]

    def _reduce_sparse(self, parameter: Tensor, factor: float) -> None:
        """Replace a sparse gradient, or none, by a multiple of the sum."""
        gradient = parameter.grad
        if gradient is None:
            index = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            values = parameter.new_empty(0, *parameter.shape[1:])
            gradient = torch.sparse_coo_tensor(index, values, parameter.shape, check_invariants=False)
        gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
        self._all_reduce(gradient)
        parameter.grad = gradient * factor

"""Gradient averaging over all ranks, with one all-reduce per dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

AllReduce = Callable[[Tensor], object]
"""Replaces a tensor by its sum over all ranks. All ranks must call this."""


class GradientPiggyback(Protocol):
    """Metadata that is sent with the gradient all-reduce, which saves a second collective."""

    def write(self, like: Tensor) -> Tensor:
        """Return integers of at most 255, exactly summable in every dtype, with the dtype and device of ``like``."""
        ...

    def read(self, sums: Tensor) -> float:
        """Process the sums over the ranks, and return the scale factor of the averaged gradients."""
        ...


class GradientReducer:
    """Averages gradients over the ranks, which may have used different parameters."""

    # A missing gradient counts as zero, unless it is missing on all ranks: then it remains None. Sparse gradients (COO)
    # remain sparse. Their parameters are included in the dense message until the first sparse gradient occurs.

    def __init__(self, num_ranks: int, all_reduce: AllReduce = dist.all_reduce) -> None:
        self._num_ranks = num_ranks
        self._all_reduce = all_reduce
        self._sparse: dict[int, Tensor] = {}

    @torch.no_grad()  # gradients may require gradients themselves
    def reduce(
        self,
        parameters: Iterable[Tensor],  # same order on all ranks; parameters that require no gradient are ignored
        factor: float = 1.0,  # scale factor of the averaged gradients
        piggyback: GradientPiggyback | None = None,
    ) -> None:
        """Replace the gradients by their means. All ranks must call this."""
        by_dtype: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                by_dtype.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for group in by_dtype.values():
            flags, sums, factor = self._sum_dense(group, factor, piggyback)
            for parameter in self._assign_dense(group, flags, sums, factor / self._num_ranks):
                self._reduce_sparse(parameter, factor / self._num_ranks)
            piggyback = None

    def _sum_dense(
        self, parameters: list[Tensor], factor: float, piggyback: GradientPiggyback | None
    ) -> tuple[tuple[list[bool], list[bool]], list[Tensor], float]:
        """All-reduce the dense gradients of parameters with the same dtype and device."""
        # The message contains two flags per parameter, the dense gradients, and the piggybacked metadata.
        is_sparse = [id(p) in self._sparse for p in parameters]
        kinds = [0 if p.grad is None else 2 if p.grad.is_sparse else 1 for p in parameters]  # none, dense, sparse
        flags = torch.tensor([*(k == 1 for k in kinds), *(k == 2 for k in kinds)], dtype=parameters[0].dtype)
        parts = [flags.to(parameters[0].device)]
        for kind, sparse, parameter in zip(kinds, is_sparse, parameters, strict=True):
            dense = parameter.grad if kind == 1 else None
            if not sparse:
                parts.append((torch.zeros_like(parameter) if dense is None else dense).reshape(-1))
        if piggyback is not None:
            parts.append(piggyback.write(parts[0]))
        flat = torch.cat(parts)
        self._all_reduce(flat)
        flag_sums, *sums = torch.split(flat, [part.numel() for part in parts])
        if piggyback is not None:
            factor = piggyback.read(sums.pop())
        # Reading the flags synchronizes an accelerator, so skip it if this rank has all gradients of the expected kind.
        has_dense, has_sparse = [kind == 1 for kind in kinds], [kind == 2 for kind in kinds]
        if flat.is_cpu or not all(kind == 1 + sparse for kind, sparse in zip(kinds, is_sparse, strict=True)):
            has_dense, has_sparse = (row.tolist() for row in (flag_sums > 0).view(2, -1))
        return (has_dense, has_sparse), sums, factor

    def _assign_dense(
        self, parameters: list[Tensor], flags: tuple[list[bool], list[bool]], sums: list[Tensor], factor: float
    ) -> list[Tensor]:
        """Replace the dense gradients by the scaled sums, and return the parameters with sparse gradients."""
        is_sparse = [id(p) in self._sparse for p in parameters]
        has_dense, has_sparse = flags
        totals, scaled, old = iter(sums), list[Tensor](), list[Tensor]()
        for parameter, is_known, dense, sparse in zip(parameters, is_sparse, has_dense, has_sparse, strict=True):
            total = None if is_known else next(totals)
            if sparse:
                self._sparse[id(parameter)] = parameter
            elif dense and total is not None:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                scaled.append(total.view(parameter.shape))
                old.append(parameter.grad)
        if old:
            torch._foreach_copy_(old, scaled)
            torch._foreach_mul_(old, factor)
        rows = zip(parameters, has_dense, has_sparse, strict=True)
        return [parameter for parameter, *has in rows if id(parameter) in self._sparse and any(has)]

    def _reduce_sparse(self, parameter: Tensor, factor: float) -> None:
        """Replace a sparse or missing gradient by the scaled sum over the ranks."""
        gradient = parameter.grad
        if gradient is None:
            index = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            values = parameter.new_empty(0, *parameter.shape[1:])
            gradient = torch.sparse_coo_tensor(index, values, parameter.shape, check_invariants=False)
        gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
        self._all_reduce(gradient)
        parameter.grad = gradient * factor

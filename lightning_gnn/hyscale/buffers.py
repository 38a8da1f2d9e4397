"""Buffers that steps write to: what each rank has written, made one again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric


_FEW = 1 << 12
"""Numbers of a buffer that are compared at each step, whether autograd knows of a change or not."""


class SharedBuffers:
    """The buffers of a module, of which each rank writes its own part in a step.

    A row that one rank has written is taken as it is. Of one that several have written, the mean counts, weighted by
    seeds: so running statistics of batch normalisation become the ranks' weighted mean. Integers are counts, and what
    the ranks have added is added up, except where all have added the same: then it is a number of steps, unless each
    has added just as many as it has seeds. A boolean is what the rank made of it that changed it.

    Args:
        module: Its buffers, on this rank's device.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[str, tuple[Tensor, int, Tensor]] = {}
        self.note()

    def note(self) -> None:
        """Take the buffers to be the same on all ranks now."""
        known, self._before = self._before, {}
        for name, buffer in self._module.named_buffers():
            last = known.get(name)
            if last is not None and last[0] is buffer and last[1] == buffer._version:
                self._before[name] = last
            else:
                self._before[name] = (buffer, buffer._version, buffer.detach().clone())

    def changed(self) -> bool:
        """Whether one has been written to on this rank, or put in the place of another, since it was noted."""
        return any(self._written(name, buffer) for name, buffer in self._module.named_buffers())

    def join(self, seeds: Sequence[int]) -> None:
        """Make them the same on all ranks, which all call this together.

        Args:
            seeds: Of each rank in the step.
        """
        rank = dist.get_rank()
        mine = {
            name: self._difference(name, buffer)
            for name, buffer in self._module.named_buffers()
            if self._written(name, buffer)
        }
        everybody: list[Any] = [None] * len(seeds)
        dist.all_gather_object(everybody, mine)
        buffers = dict(self._module.named_buffers())
        for name in {name: None for written in everybody for name in written}:
            found = {other: written[name] for other, written in enumerate(everybody) if name in written}
            if name in buffers and all(shape == list(buffers[name].shape) for shape, *_ in found.values()):
                with torch.no_grad():
                    self._put(buffers[name], self._joined(name, buffers[name], found, seeds))
            elif rank not in found or len(found) < len(seeds):
                raise RuntimeError(
                    f"the buffer {name} has another shape on rank {min(found)} than on other ranks: hyscale's trainers "
                    "can write to buffers, but must not change their shapes by themselves"
                )
        self.note()

    def _written(self, name: str, buffer: Tensor) -> bool:
        last = self._before.get(name)
        if last is None or last[0] is not buffer or last[1] != buffer._version:
            return True
        # Kernels of batch normalisation write to running statistics without telling autograd.
        unseen = name.rpartition(".")[2] in ("running_mean", "running_var") or buffer.numel() <= _FEW
        return unseen and not torch.equal(last[2], buffer)

    def _difference(self, name: str, buffer: Tensor) -> tuple[list[int], Tensor, Tensor]:
        """Return a buffer's shape, which of its rows differ from those noted, and the rows (of counts, what was added)."""
        now = _rows(buffer.detach())
        before = self._noted(name, buffer)
        differs = ~((now == before) | (now.isnan() & before.isnan())) if now.is_floating_point() else now != before
        rows = differs.any(dim=1).nonzero().squeeze(1)
        new = now[rows]
        if not (new.is_floating_point() or new.dtype == torch.bool):
            new = new - before[rows]
        return list(buffer.shape), rows.cpu(), new.cpu()

    def _noted(self, name: str, buffer: Tensor) -> Tensor:
        """Return the rows that were noted; zeros for a buffer that is new or has another shape."""
        last = self._before.get(name)
        known = last is not None and last[2].shape == buffer.shape and last[2].device == buffer.device
        return _rows(last[2] if last is not None and known else torch.zeros_like(buffer))

    def _joined(
        self, name: str, buffer: Tensor, found: dict[int, tuple[list[int], Tensor, Tensor]], seeds: Sequence[int]
    ) -> Tensor:
        rows = self._noted(name, buffer).cpu().clone()
        if rows.is_floating_point():
            return _weighted(rows, found, seeds)
        if rows.dtype == torch.bool:
            for _, index, new in found.values():
                rows[index] = torch.where(new != rows[index], new, rows[index])
            return rows
        _, index, added = found[min(found)]
        same = len(found) >= sum(number > 0 for number in seeds) and all(
            index.equal(other[1]) and added.equal(other[2]) for other in found.values()
        )
        of_seeds = all(int(other[2].sum()) == seeds[rank] > 1 for rank, other in found.items())
        if same and not of_seeds:
            rows[index] += added
            return rows
        for _, index, added in found.values():
            rows[index] += added
        return rows

    @staticmethod
    def _put(buffer: Tensor, rows: Tensor) -> None:
        buffer.copy_(rows.view(buffer.shape))


def _weighted(rows: Tensor, found: dict[int, tuple[list[int], Tensor, Tensor]], seeds: Sequence[int]) -> Tensor:
    """Return rows with those that ranks have written: as they are from one rank, as a weighted mean from several."""
    count = torch.zeros(rows.size(0), dtype=torch.int64)
    for _, index, _ in found.values():
        count[index] += 1
    whole = sum(seeds[rank] for rank in found)
    sums, weights = torch.zeros_like(rows), torch.zeros(rows.size(0), 1, dtype=rows.dtype)
    for rank, (_, index, new) in found.items():
        alone = count[index] == 1
        rows[index[alone]] = new[alone]
        weight = seeds[rank] if whole else 1
        if weight and not bool(alone.all()):
            sums[index] += new * weight
            weights[index] += weight
    several = (count > 1) & (weights.squeeze(1) > 0)
    rows[several] = sums[several] / weights[several]
    return rows


def _rows(buffer: Tensor) -> Tensor:
    return buffer.flatten(1) if buffer.dim() > 1 else buffer.reshape(-1, 1)


@contextmanager
def uncounted(module: nn.Module) -> Iterator[None]:
    """Run a step that must not count: buffers, and the states of torchmetrics, are put back as they were afterwards.

    Args:
        module: Its step makes the same calls as those of other ranks, so that no metric is missing where all synchronise.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    states = [{name: _copied(getattr(metric, name)) for name in metric._defaults} for metric in metrics]
    counts = [(metric._update_count, metric._computed) for metric in metrics]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for metric, state, (count, computed) in zip(metrics, states, counts, strict=True):
            for name, value in state.items():
                if isinstance(value, list):  # of what was added, nothing but the shape: ranks with an empty list hang
                    value += [item[:0] for item in getattr(metric, name)[len(value) :] if item.dim()]
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, computed


def _copied(state: Any) -> Any:
    """Return a state of a metric as it is now: a list of what is never changed, or what is written to."""
    return list(state) if isinstance(state, list) else state.detach().clone() if isinstance(state, Tensor) else state

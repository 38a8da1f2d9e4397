"""Buffers that steps write to: what the ranks have written, made equal on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

_SMALL = 1 << 18
"""Numbers in a buffer up to which it is compared with what it was. Larger ones are looked at where torch says that they
were written to, which it does not of batch normalization, kernels of others, and writes to ``buffer.data``."""


_Written = dict[str, tuple[list[int], Tensor, Tensor]]
"""By the name of a buffer: its shape, which of its rows were written, and the rows."""


class BufferSync:
    """The buffers of a module, of which each rank writes its own part in a step."""

    # A row that one rank has written is taken as it is; of one that several have written, the mean counts, weighted by
    # seeds (running statistics of batch normalization). Integers are counts: what ranks added is added up, unless all
    # added the same, a number of steps, and not just as many as they have seeds. A boolean is what the rank made of it
    # that changed it. Ranks without seeds do not count.

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

    def changed(self) -> bool | Tensor:
        """Whether one has been written to on this rank, or put in the place of another, since it was noted."""
        buffers = dict(self._module.named_buffers())
        if any(self._written(name, buffer) for name, buffer in buffers.items()):
            return True
        small = [_differs(b, self._before[name][2]).any() for name, b in buffers.items() if b.numel() <= _SMALL]
        return torch.stack([flag.to(small[0].device) for flag in small]).any() if small else False

    def join(self, seeds: Sequence[int]) -> None:
        """Make them the same on all ranks, which all call this together."""
        rank = dist.get_rank()
        buffers = dict(self._module.named_buffers())
        written = {name: self._difference(name, buffer) for name, buffer in buffers.items()}
        mine = {name: difference for name, difference in written.items() if difference is not None}
        everybody: list[_Written] = [{}] * len(seeds)
        dist.all_gather_object(everybody, mine if seeds[rank] else {})
        for name in {name: None for theirs in everybody for name in theirs}:
            found = {other: theirs[name] for other, theirs in enumerate(everybody) if name in theirs}
            shapes = {tuple(shape) for shape, *_ in found.values()}
            by_all = all(other in found for other, number in enumerate(seeds) if number)
            agreed = tuple(self._before[name][2].shape) if name in self._before else None
            if not by_all and shapes != {agreed}:
                raise RuntimeError(
                    f"the buffer {name} has another shape on rank {min(found)} than on other ranks: hyscale's trainers "
                    "can write to buffers, but must not change their shapes by themselves"
                )
            if name in buffers and len(shapes) == 1:  # else each rank that wrote it has one of its own
                with torch.no_grad():
                    buffer = buffers[name].resize_(*shapes)
                    buffer.copy_(self._joined(name, buffer, found, seeds).view(buffer.shape))
        if not seeds[rank]:
            with torch.no_grad():
                for name in mine.keys() & self._before.keys() - {name for theirs in everybody for name in theirs}:
                    buffers[name].resize_(self._before[name][2].shape).copy_(self._before[name][2])
        self.note()

    def _written(self, name: str, buffer: Tensor) -> bool:
        last = self._before.get(name)
        return last is None or last[0] is not buffer or last[1] != buffer._version

    def _difference(self, name: str, buffer: Tensor) -> tuple[list[int], Tensor, Tensor] | None:
        """Return a buffer's shape, which rows differ from those noted, and the rows (of counts, what was added)."""
        if buffer.numel() > _SMALL and not self._written(name, buffer):
            return None
        now = _rows(buffer.detach())
        before = self._noted(name, buffer)
        rows = _differs(now, before).any(dim=1).nonzero().squeeze(1)
        last = self._before.get(name)
        if not len(rows) and last is not None and last[2].shape == buffer.shape:
            return None
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


def _differs(now: Tensor, before: Tensor) -> Tensor:
    """Return where numbers differ; one NaN is like another."""
    return (now != before) & ((now == now) | (before == before))


def _rows(buffer: Tensor) -> Tensor:
    return buffer.flatten(1) if buffer.dim() > 1 else buffer.reshape(-1, 1)


@contextmanager
def no_side_effects(module: nn.Module) -> Iterator[None]:
    """Run a step that must not count: buffers, and the states of torchmetrics, are put back as they were afterwards."""
    # It makes the same calls as those of other ranks, or a metric would miss where all synchronize.
    buffers = [
        (part._buffers, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    states = [{name: _copied(getattr(metric, name)) for name in metric._defaults} for metric in metrics]
    counts = [(metric._update_count, metric._computed) for metric in metrics]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, before in buffers:
                owner[name] = buffer.resize_(before.shape).copy_(before)
        for metric, state, (count, computed) in zip(metrics, states, counts, strict=True):
            for name, value in state.items():
                if isinstance(value, list):  # of what was added, nothing but the shape: ranks with an empty list hang
                    value += [item[:0] for item in getattr(metric, name)[len(value) :] if item.dim()]
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, computed


def _copied(state: object) -> object:
    """Return a state of a metric as it is now: a list of what is never changed, or what is written to."""
    return list(state) if isinstance(state, list) else state.detach().clone() if isinstance(state, Tensor) else state

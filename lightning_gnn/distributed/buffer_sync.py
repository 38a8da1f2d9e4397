"""Synchronization of module buffers that the ranks write to during a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gnn.distributed.module_tree import map_buffers, named_parts
from lightning_gnn.runtime.devices import all_gather_objects

_MAX_NUMEL = 1 << 18
"""Buffers of at most this size are compared by value. Larger ones are checked by torch's version counter, which misses
writes by batch normalization, third-party kernels and ``buffer.data``."""
_RowUpdates = dict[str, tuple[list[int], Tensor, Tensor]]
"""Maps the name of a buffer to its shape, the indices of the written rows, and the rows."""


class BufferSync:
    """Merges the writes of all ranks to a module's buffers."""

    # A row written by one rank is copied. A row written by several ranks becomes their mean, weighted by seeds (running
    # statistics of batch normalization). Integers are counters: increments are summed, unless all ranks added the same,
    # which indicates a number of steps (but not if each rank added its number of seeds). A boolean takes the changed
    # value. Ranks without seeds are ignored.

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._snapshot: dict[str, tuple[Tensor, int, Tensor]] = {}
        self.take_snapshot()

    def take_snapshot(self) -> None:
        """Record the buffers, which must be equal on all ranks now."""
        previous, self._snapshot = self._snapshot, {}
        for name, buffer in map_buffers(self._module).items():
            last = previous.get(name)
            if last is not None and last[0] is buffer and last[1] == buffer._version:
                self._snapshot[name] = last
            else:
                self._snapshot[name] = (buffer, buffer._version, buffer.detach().clone())

    def has_changed(self) -> bool | Tensor:
        """Whether this rank has written to or replaced a buffer since the snapshot."""
        buffers = map_buffers(self._module)
        if any(self._was_written(name, buffer) for name, buffer in buffers.items()):
            return True
        small = [_differs(b, self._snapshot[name][2]).any() for name, b in buffers.items() if b.numel() <= _MAX_NUMEL]
        return torch.stack([flag.to(small[0].device) for flag in small]).any() if small else False

    def synchronize(self, seeds: Sequence[int]) -> None:
        """Merge the writes of all ranks, which have ``seeds`` seeds. All ranks must call this."""
        rank = dist.get_rank()
        buffers = map_buffers(self._module)
        written = {name: self._find_written_rows(name, buffer) for name, buffer in buffers.items()}
        own = {name: update for name, update in written.items() if update is not None}
        gathered: list[_RowUpdates] = all_gather_objects(own if seeds[rank] else {})
        for name in {name: None for updates in gathered for name in updates}:
            by_rank = {other: updates[name] for other, updates in enumerate(gathered) if name in updates}
            shapes = {tuple(shape) for shape, *_ in by_rank.values()}
            is_written_by_all = all(other in by_rank for other, number in enumerate(seeds) if number)
            old_shape = tuple(self._snapshot[name][2].shape) if name in self._snapshot else None
            if not is_written_by_all and shapes != {old_shape}:
                raise RuntimeError(
                    f"the buffer {name} has a different shape on rank {min(by_rank)} than on other ranks: hyscale's "
                    "trainers can write to buffers, but a single rank must not change their shapes"
                )
            if name in buffers and len(shapes) == 1:  # otherwise each rank retains a buffer with its own shape
                with torch.no_grad():
                    buffer = buffers[name].resize_(*shapes)
                    buffer.copy_(self._merge_rows(name, buffer, by_rank, seeds).view(buffer.shape))
        if not seeds[rank]:
            with torch.no_grad():
                for name in own.keys() & self._snapshot.keys() - {name for updates in gathered for name in updates}:
                    buffers[name].resize_(self._snapshot[name][2].shape).copy_(self._snapshot[name][2])
        self.take_snapshot()

    def _was_written(self, name: str, buffer: Tensor) -> bool:
        last = self._snapshot.get(name)
        return last is None or last[0] is not buffer or last[1] != buffer._version

    def _find_written_rows(self, name: str, buffer: Tensor) -> tuple[list[int], Tensor, Tensor] | None:
        """Return a buffer's shape, the indices of its changed rows, and the rows (for integers, the increments)."""
        if buffer.numel() > _MAX_NUMEL and not self._was_written(name, buffer):
            return None
        now = _as_rows(buffer.detach())
        before = self._snapshot_rows(name, buffer)
        rows = _differs(now, before).any(dim=1).nonzero().squeeze(1)
        last = self._snapshot.get(name)
        if not len(rows) and last is not None and last[2].shape == buffer.shape:
            return None
        new = now[rows]
        if not (new.is_floating_point() or new.dtype == torch.bool):
            new = new - before[rows]
        return list(buffer.shape), rows.cpu(), new.cpu()

    def _snapshot_rows(self, name: str, buffer: Tensor) -> Tensor:
        """Return the rows of the snapshot; zeros for a buffer that is new or has another shape."""
        last = self._snapshot.get(name)
        is_known = last is not None and last[2].shape == buffer.shape and last[2].device == buffer.device
        return _as_rows(last[2] if last is not None and is_known else torch.zeros_like(buffer))

    def _merge_rows(
        self, name: str, buffer: Tensor, by_rank: dict[int, tuple[list[int], Tensor, Tensor]], seeds: Sequence[int]
    ) -> Tensor:
        rows = self._snapshot_rows(name, buffer).cpu().clone()
        if rows.is_floating_point():
            return _average_rows(rows, by_rank, seeds)
        if rows.dtype == torch.bool:
            for _, index, new in by_rank.values():
                rows[index] = torch.where(new != rows[index], new, rows[index])
            return rows
        # Equal increments count steps and are added once, unless they equal the ranks' numbers of seeds.
        _, index, added = by_rank[min(by_rank)]
        is_equal = len(by_rank) >= sum(number > 0 for number in seeds) and all(
            index.equal(other[1]) and added.equal(other[2]) for other in by_rank.values()
        )
        counts_seeds = all(int(other[2].sum()) == seeds[rank] > 1 for rank, other in by_rank.items())
        if is_equal and not counts_seeds:
            rows[index] += added
            return rows
        for _, index, added in by_rank.values():
            rows[index] += added
        return rows


def _average_rows(rows: Tensor, by_rank: dict[int, tuple[list[int], Tensor, Tensor]], seeds: Sequence[int]) -> Tensor:
    """Update rows with those written by the ranks: copied from a single rank, averaged by seeds from several."""
    count = torch.zeros(rows.size(0), dtype=torch.int64)
    for _, index, _ in by_rank.values():
        count[index] += 1
    total = sum(seeds[rank] for rank in by_rank)
    sums, weights = torch.zeros_like(rows), torch.zeros(rows.size(0), 1, dtype=rows.dtype)
    for rank, (_, index, new) in by_rank.items():
        is_single = count[index] == 1
        rows[index[is_single]] = new[is_single]
        weight = seeds[rank] if total else 1
        if weight and not bool(is_single.all()):
            sums[index] += new * weight
            weights[index] += weight
    several = (count > 1) & (weights.squeeze(1) > 0)
    rows[several] = sums[several] / weights[several]
    return rows


def _differs(now: Tensor, before: Tensor) -> Tensor:
    """Return where values differ, with NaN equal to NaN."""
    return (now != before) & ((now == now) | (before == before))


def _as_rows(buffer: Tensor) -> Tensor:
    return buffer.flatten(1) if buffer.dim() > 1 else buffer.reshape(-1, 1)


@contextmanager
def no_side_effects(module: nn.Module) -> Iterator[None]:
    """Run a step whose effects are discarded: restores buffers and torchmetrics states afterwards."""
    # The step must run nevertheless: metrics synchronize across ranks, so every rank must make the same calls.
    buffers = [
        (part._buffers, name, buffer, buffer.detach().clone())
        for _, part in named_parts(module)
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    metrics = [part for _, part in named_parts(module) if isinstance(part, Metric)]
    states = [{name: getattr(metric, name) for name in metric._defaults} for metric in metrics]
    for state in states:  # lists are copied shallowly, since their items are never modified
        state.update({name: x.detach().clone() if isinstance(x, Tensor) else list(x) for name, x in state.items()})
    counts = [(metric._update_count, metric._computed) for metric in metrics]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, before in buffers:
                owner[name] = buffer.resize_(before.shape).copy_(before)
        for metric, state, (count, computed) in zip(metrics, states, counts, strict=True):
            for name, value in state.items():
                if isinstance(value, list):  # append empty tensors of the same shape: an empty list would hang a sync
                    value += [item[:0] for item in getattr(metric, name)[len(value) :] if item.dim()]
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, computed

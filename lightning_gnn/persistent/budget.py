"""One plan for the memory of a device: topology, features, caches of hot rows and lists, mini-batches.

All of them compete for the same bytes. What is read from host memory costs the bytes that cross the bus, as counted in
mini-batches that were sampled first; the plan is the one that saves most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.graph.cache import Cacheable, CacheOrder
from lightning_gnn.runtime.byte_sizes import shown

FOR_THE_MODEL = 0.25
"""Of the device's memory, how much is left to the model and its activations."""
_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Part:
    """Something that is read to make mini-batches.

    Args:
        name: What messages call it.
        nbytes: What it takes on the device as a whole.
        place: What the user asked for: ``"device"``, ``"pinned"`` or ``"auto"``.
        reads: What it would cost to read it from host memory, in bytes that cross the bus.
        pinned_bytes: What of it is on the device all the same where it lies in host memory.
        hot: What of it may be cached where it lies in host memory; None: nothing.
        kept: Entries of ``hot`` that are cached there anyway, int64 ``[n]``, and no others; in ``pinned_bytes``.
    """

    name: str
    nbytes: int
    place: str = "auto"
    reads: float = 0.0
    pinned_bytes: int = 0
    hot: Cacheable | None = None
    kept: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Placed:
    """Where a part lies.

    Args:
        name: Its name.
        place: ``"device"`` or ``"pinned"``.
        nbytes: What it takes on the device, its cache left out.
        nodes: Whose rows or lists the device holds of what is pinned, int64 ``[n]``, the most beneficial first.
        cache_bytes: What these take, their lookup table included.
    """

    name: str
    place: str
    nbytes: int
    nodes: Tensor = _NONE
    cache_bytes: int = 0

    def served(self, part: Part) -> float:
        """Return what of the cost of some reads is saved."""
        if self.place == "device":
            return part.reads
        if part.hot is None or not self.nodes.numel():
            return 0.0
        return float(part.hot.reads[self.nodes.numpy()].sum() * part.hot.cost)


@dataclass(frozen=True, eq=False)
class Placement:
    """What lies where, and what it takes.

    Args:
        memory: Bytes of the device that were free.
        parts: Topology and tables.
        fixed: Bytes of other attributes, which are always on the device.
        buffers: Bytes of mini-batches and of what sampling needs beside the graph.
        hit_rate: The share of the bytes read that does not cross the bus.
        num_batches: Mini-batches that were counted for it; 0 where all fits.
    """

    memory: int
    parts: tuple[Placed, ...]
    fixed: int
    buffers: int
    hit_rate: float = 1.0
    num_batches: int = 0

    @property
    def nbytes(self) -> int:
        """What all of it takes on the device."""
        return self.fixed + self.buffers + sum(part.nbytes + part.cache_bytes for part in self.parts)

    def __getitem__(self, name: str) -> Placed:
        """Return a part by its name."""
        return next(part for part in self.parts if part.name == name)

    def rate(self, parts: Sequence[Part]) -> float:
        """Return the share of the cost of some reads that is saved, which may be others than it was planned for."""
        total = sum(part.reads for part in parts)
        saved = sum(placed.served(part) for placed, part in zip(self.parts, parts, strict=True))
        return min(1.0, saved / total) if total else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return its numbers, for a file."""
        parts = {
            part.name: {
                "place": part.place,
                "device_bytes": part.nbytes + part.cache_bytes,
                "cached": part.nodes.numel(),
            }
            for part in self.parts
        }
        names = ("memory", "nbytes", "buffers", "fixed", "hit_rate", "num_batches")
        return {**{name: getattr(self, name) for name in names}, "placement": parts}

    def __str__(self) -> str:
        said = []
        for part in self.parts:
            there = shown(part.nbytes + part.cache_bytes)
            said.append(f"{part.name} {there}" + " of it, the rest in host memory" * (part.place == "pinned"))
        said.append(f"mini-batches {shown(self.buffers)}")
        said += [f"other attributes {shown(self.fixed)}"] if self.fixed else []
        first = f"{shown(self.nbytes)} of {shown(self.memory)} on the device: {'; '.join(said)}"
        if not self.num_batches:
            return first
        counted = f"by {self.num_batches} mini-batches that were sampled first"
        return f"{first}\n{self.hit_rate:.0%} of the bytes that mini-batches read are on the device, {counted}"


def place_parts(
    parts: Sequence[Part], memory: int, *, buffers: int = 0, fixed: int = 0, cache_bytes: int | None = None
) -> Placement:
    """Choose where topology and tables lie, and what of them is cached, so that most reads are on the device.

    A quarter of the memory is left to the model, unless what the user wants on the device takes it.

    Args:
        parts: Topology and tables.
        memory: Free bytes of the device.
        buffers: Bytes for mini-batches.
        fixed: Bytes that are on the device in any case.
        cache_bytes: Of caches, at most; None: whatever is left.

    Raises:
        ValueError: What is wanted on the device does not fit there; the message has the sizes.

    Source: DUCATI splits one budget between two caches by the benefit of the next hottest entry per byte; here whole
    tables, and what mini-batches take, are in the same plan.
    """
    least = buffers + fixed + sum(part.nbytes if part.place == "device" else part.pinned_bytes for part in parts)
    if least > memory:
        wanted = [f"{part.name} {shown(part.nbytes)}" for part in parts if part.place == "device"]
        raise ValueError(
            f"{shown(least)} are wanted on a device with {shown(memory)} free: "
            f"{', '.join([*wanted, f'mini-batches {shown(buffers)}', f'other attributes {shown(fixed)}'])}; place "
            "topology or features 'auto' or 'pinned', or make prefetch, bulk or the mini-batches smaller"
        )
    limit = max(least, memory - int(FOR_THE_MODEL * memory))
    hot = [number for number, part in enumerate(parts) if part.place != "device" and part.hot and part.kept is None]
    order = CacheOrder([_hot(parts[number]) for number in hot])
    free = [number for number, part in enumerate(parts) if part.place == "auto"]
    best: tuple[float, Any] = (-1.0, None)
    for there in _choices(free, parts):
        used = least + sum(parts[number].nbytes - parts[number].pinned_bytes for number in there)
        anyway = [_pinned(part) for number, part in enumerate(parts) if part.place != "device" and number not in there]
        saved = sum(part.served(own) for part, own in anyway) + sum(parts[number].reads for number in there)
        most = saved + sum(parts[number].reads for number in hot if number not in there)
        if used > limit or most <= best[0]:
            continue
        left = limit - used if cache_bytes is None else min(cache_bytes, limit - used)
        caches = order.best(left, [at for at, number in enumerate(hot) if number not in there])
        saved += sum(caches.gains)
        if saved > best[0]:
            best = saved, (there, caches)
    there, caches = best[1]
    placed = []
    for number, part in enumerate(parts):
        if part.place == "device" or number in there:
            placed.append(Placed(part.name, "device", part.nbytes))
        elif number in hot:
            at = hot.index(number)
            placed.append(Placed(part.name, "pinned", part.pinned_bytes, caches.nodes[at], caches.nbytes[at]))
        else:
            placed.append(_pinned(part)[0])
    plan = Placement(memory, tuple(placed), fixed, buffers)
    return replace(plan, hit_rate=plan.rate(parts))


def _pinned(part: Part) -> tuple[Placed, Part]:
    """Return a part in host memory, without a cache but of what is kept anyway."""
    return Placed(part.name, "pinned", part.pinned_bytes, _NONE if part.kept is None else part.kept), part


def _hot(part: Part) -> Cacheable:
    assert part.hot is not None
    return part.hot


def _choices(free: Sequence[int], parts: Sequence[Part]) -> Iterator[tuple[int, ...]]:
    """Give what may be on the device, the most first: of equals, what no cache has to be right about.

    All choices of up to six parts; of more, those that are read most per byte, with or without any one of them.
    """
    if len(free) <= 6:
        for size in range(len(free), -1, -1):
            yield from combinations(free, size)
        return
    order = sorted(free, key=lambda number: -parts[number].reads / max(parts[number].nbytes, 1))
    for size in range(len(order), -1, -1):
        for without in (None, *order[:size]):
            yield tuple(number for number in order[:size] if number != without)

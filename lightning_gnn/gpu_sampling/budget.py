"""One plan for the memory of a device: topology, features, caches of hot rows and lists, mini-batches.

What is read from host memory costs the bytes that cross the bus, as counted in mini-batches that were sampled first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.features.hot_cache import Cacheable, CacheOrder
from lightning_gnn.runtime.messages import shown

FOR_THE_MODEL = 0.25  # of the device's memory, how much is left to the model and its activations
# What a byte from another GPU of the machine costs, of one from host memory: NVLink brings nine to twelve times as much
# as the PCIe beside it (450 and 50 GB/s, 300 and 25).
LINK = 0.1
_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class PlacedArray:
    """Something that is read to make mini-batches."""

    name: str
    nbytes: int  # on the device as a whole
    place: str = "auto"  # what the user asked for: device, shard, pinned or auto
    reads: float = 0.0  # what reading it from host memory would cost, in bytes that cross the bus
    pinned_bytes: int = 0  # of it on the device all the same where it lies in host memory
    hot: Cacheable | None = None  # what may be cached where it lies in host memory
    kept: Tensor | None = None  # entries of hot, int64 [n], that alone are cached there, counted in pinned_bytes
    shard_bytes: int | None = None  # on each GPU of the machine where it is dealt out; None: it cannot be
    gpus: int = 1  # how many these are

    def bytes_at(self, place: str) -> int:
        """Return what it takes on each device, its cache left out."""
        if place == "shard":
            return self.nbytes if self.shard_bytes is None else self.shard_bytes
        return self.nbytes if place == "device" else self.pinned_bytes

    def saved_at(self, place: str) -> float:
        """Return what of the cost of its reads is saved there without a cache: on other GPUs it is a tenth."""
        if place == "pinned":
            return 0.0
        return self.reads * (1 - LINK * (self.gpus - 1) / self.gpus) if place == "shard" else self.reads


@dataclass(frozen=True, eq=False)
class Placed:
    """Where a part lies: ``"device"``, ``"shard"`` or ``"pinned"``."""

    name: str
    place: str
    nbytes: int  # on each device, its cache left out
    nodes: Tensor = _NONE  # whose rows or lists are cached of what is pinned, int64 [n], the most beneficial first
    cache_bytes: int = 0  # with the lookup table
    gpus: int = 1  # to how many it is dealt out, where it is

    def served(self, part: PlacedArray) -> float:
        """Return what of the cost of some reads is saved."""
        if self.place != "pinned":
            return part.saved_at(self.place)
        if part.hot is None or not self.nodes.numel():
            return 0.0
        return float(part.hot.reads[self.nodes.numpy()].sum() * part.hot.cost)


@dataclass(frozen=True, eq=False)
class Placement:
    """What lies where, and what it takes."""

    memory: int  # bytes of the device that were free
    parts: tuple[Placed, ...]
    fixed: int  # bytes of other attributes, which are always on the device
    buffers: int  # bytes of mini-batches and of what sampling needs beside the graph
    bulk: int = 1  # mini-batches that are sampled in one launch
    hit_rate: float = 1.0  # share of the bytes read that does not cross the bus; nine tenths of other GPUs' bytes
    num_batches: int = 0  # mini-batches that were counted for it; 0 where all fits

    @property
    def nbytes(self) -> int:
        """What all of it takes on the device."""
        return self.fixed + self.buffers + sum(part.nbytes + part.cache_bytes for part in self.parts)

    def __getitem__(self, name: str) -> Placed:
        """Return a part by its name."""
        return next(part for part in self.parts if part.name == name)

    def rate(self, parts: Sequence[PlacedArray]) -> float:
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
        names = ("memory", "nbytes", "buffers", "bulk", "fixed", "hit_rate", "num_batches")
        return {**{name: getattr(self, name) for name in names}, "placement": parts}

    def __str__(self) -> str:
        said = []
        for part in self.parts:
            there = shown(part.nbytes + part.cache_bytes)
            where = {
                "pinned": " of it, the rest in host memory",
                "shard": f" of it on each of {part.gpus} GPUs",
            }
            said.append(f"{part.name} {there}{where.get(part.place, '')}")
        said.append(f"mini-batches {shown(self.buffers)}" + (f", {self.bulk} to a launch" if self.bulk > 1 else ""))
        said += [f"other attributes {shown(self.fixed)}"] if self.fixed else []
        first = f"{shown(self.nbytes)} of {shown(self.memory)} on the device: {'; '.join(said)}"
        if not self.num_batches:
            return first
        counted = f"by {self.num_batches} mini-batches that were sampled first"
        return f"{first}\n{self.hit_rate:.0%} of the bytes that mini-batches read are on the device, {counted}"


def place_parts(
    parts: Sequence[PlacedArray], memory: int, *, buffers: int = 0, fixed: int = 0, cache_bytes: int | None = None
) -> Placement:
    """Choose where topology and tables lie, and what of them is cached, so that most reads are on the device.

    Source: DUCATI's benefit of the next entry per byte, extended to whole tables and to mini-batches. A quarter of the
    memory is left to the model, unless what the user wants on the device takes it.
    """
    # Dealing a part out needs a known size of its shards; on one GPU it is the same as placing it on the device.
    for part in parts:
        if part.place == "shard" and part.shard_bytes is None and part.gpus > 1:
            raise ValueError(f"{part.name} cannot be dealt out to {part.gpus} GPUs; place it 'device' or 'pinned'")
    given = {n: "device" if p.place == "shard" and p.gpus == 1 else p.place for n, p in enumerate(parts)}
    # Compare what has to be on the device in any case with the free memory.
    least = buffers + fixed
    least += sum(p.pinned_bytes if given[n] == "auto" else p.bytes_at(given[n]) for n, p in enumerate(parts))
    if least > memory:
        there = [(n, part) for n, part in enumerate(parts) if given[n] in ("device", "shard")]
        wanted = [f"{part.name} {shown(part.bytes_at(given[n]))}" for n, part in there]
        raise ValueError(
            f"{shown(least)} are wanted on a device with {shown(memory)} free: "
            f"{', '.join([*wanted, f'mini-batches {shown(buffers)}', f'other attributes {shown(fixed)}'])}; place "
            "topology or features 'auto' or 'pinned', or make prefetch, bulk or the mini-batches smaller"
        )
    # The model gets its reserve unless the user's own placements take it.
    limit = max(least, memory - int(FOR_THE_MODEL * memory))
    # Parts that may be pinned, have counted reads and no fixed cache compete for the caches.
    hot = [n for n, part in enumerate(parts) if given[n] in ("auto", "pinned") and part.hot and part.kept is None]
    order = CacheOrder([kind for number in hot if (kind := parts[number].hot) is not None])
    free = [number for number in given if given[number] == "auto"]
    # Try every combination of places, and divide the remaining memory among the caches of what stays pinned.
    best: tuple[float, Any] = (-1.0, None)
    for chosen in _choices(free, parts):
        places = given | chosen
        used = least + sum(parts[n].bytes_at(place) - parts[n].pinned_bytes for n, place in chosen.items())
        anyway = [_pinned(part) for n, part in enumerate(parts) if places[n] == "pinned"]
        saved = sum(part.served(own) for part, own in anyway)
        saved += sum(parts[n].saved_at(place) for n, place in places.items())
        # Skip what does not fit, and what could not win even if every read of the cacheable parts were a hit.
        most = saved + sum(parts[number].reads for number in hot if places[number] == "pinned")
        if used > limit or most <= best[0]:
            continue
        left = limit - used if cache_bytes is None else min(cache_bytes, limit - used)
        caches = order.best(left, [at for at, number in enumerate(hot) if places[number] == "pinned"])
        saved += sum(caches.gains)
        if saved > best[0]:
            best = saved, (places, caches)
    places, caches = best[1]
    # Describe the chosen placement part by part, with the rows that each cache holds.
    placed = []
    for number, part in enumerate(parts):
        if places[number] != "pinned":
            placed.append(Placed(part.name, places[number], part.bytes_at(places[number]), gpus=part.gpus))
        elif number in hot:
            at = hot.index(number)
            placed.append(replace(_pinned(part)[0], nodes=caches.nodes[at], cache_bytes=caches.nbytes[at]))
        else:
            placed.append(_pinned(part)[0])
    plan = Placement(memory, tuple(placed), fixed, buffers)
    return replace(plan, hit_rate=plan.rate(parts))


def _pinned(part: PlacedArray) -> tuple[Placed, PlacedArray]:
    """Return a part in host memory, without a cache but of what is kept anyway."""
    return Placed(part.name, "pinned", part.pinned_bytes, _NONE if part.kept is None else part.kept), part


def _choices(free: Sequence[int], parts: Sequence[PlacedArray]) -> Iterator[dict[int, str]]:
    """Give what may be where, the most on the device first: of equals, what no cache has to be right about."""
    dealt = [number for number in free if parts[number].shard_bytes is not None and parts[number].gpus > 1]
    # All choices of up to six parts; of more, those read most per byte, without any one of them, and of the others as
    # many as fit dealt out to the GPUs.
    if len(free) <= 6:
        ways = [("device", "shard", "pinned") if number in dealt else ("device", "pinned") for number in free]
        rank = {"device": 0, "shard": 1, "pinned": 2}
        for places in sorted(product(*ways), key=lambda chosen: sum(rank[place] for place in chosen)):
            yield dict(zip(free, places, strict=True))
        return
    order = sorted(free, key=lambda number: -parts[number].reads / max(parts[number].nbytes, 1))
    for size in range(len(order), -1, -1):
        for without in (None, *order[:size]):
            there = {number: "device" for number in order[:size] if number != without}
            others = [number for number in order if number not in there and number in dealt]
            for more in range(len(others), -1, -1):
                yield dict.fromkeys(free, "pinned") | dict.fromkeys(others[:more], "shard") | there

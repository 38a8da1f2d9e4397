"""Plans the memory of a device: topology, features, caches of hot rows and lists, and mini-batches.

The cost of reading host memory is the number of bytes that cross the bus, counted in pre-sampled mini-batches.
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

MODEL_FRACTION = 0.25  # of the device's memory, reserved for the model and its activations
# Cost of a byte from another GPU, relative to a byte from host memory: NVLink has 9 to 12 times the bandwidth of the
# machine's PCIe (450 and 50 GB/s, 300 and 25 GB/s).
PEER_BYTE_COST = 0.1
_EMPTY_INT64 = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class PlacedArray:
    """Array that mini-batches read, with its possible placements."""

    name: str
    nbytes: int  # bytes on the device if stored there completely
    place: str = "auto"  # placement that the user requested: device, shard, pinned or auto
    reads: float = 0.0  # cost of reading it from host memory, in bytes that cross the bus
    pinned_bytes: int = 0  # bytes that are on the device even if the array is pinned
    hot: Cacheable | None = None  # entries that can be cached if the array is pinned
    cached: Tensor | None = None  # entries to cache if pinned, int64 [n]; pinned_bytes includes their bytes
    shard_bytes: int | None = None  # bytes on each GPU of the machine if sharded; None: it cannot be sharded
    gpus: int = 1  # number of GPUs for sharding

    def bytes_at(self, place: str) -> int:
        """Return its bytes on each device for a placement, without its cache."""
        if place == "shard":
            return self.nbytes if self.shard_bytes is None else self.shard_bytes
        return self.nbytes if place == "device" else self.pinned_bytes

    def saved_at(self, place: str) -> float:
        """Return the read cost that a placement saves without a cache; reads from other GPUs cost a tenth."""
        if place == "pinned":
            return 0.0
        return self.reads * (1 - PEER_BYTE_COST * (self.gpus - 1) / self.gpus) if place == "shard" else self.reads


@dataclass(frozen=True, eq=False)
class ArrayPlacement:
    """Placement of one array: ``"device"``, ``"shard"`` or ``"pinned"``."""

    name: str
    place: str
    nbytes: int  # bytes on each device, without its cache
    nodes: Tensor = _EMPTY_INT64  # nodes with cached rows or lists, int64 [n], most beneficial first, if pinned
    cache_bytes: int = 0  # including the lookup table
    gpus: int = 1  # number of GPUs, if sharded

    def saved(self, part: PlacedArray) -> float:
        """Return the read cost that this placement and its cache save, for the access counts of ``part``."""
        if self.place != "pinned":
            return part.saved_at(self.place)
        if part.hot is None or not self.nodes.numel():
            return 0.0
        return float(part.hot.reads[self.nodes.numpy()].sum() * part.hot.cost)


@dataclass(frozen=True, eq=False)
class Placement:
    """Placement of all arrays, with the memory that they take."""

    memory: int  # free bytes of the device
    parts: tuple[ArrayPlacement, ...]
    fixed: int  # bytes of other attributes, which are always on the device
    buffers: int  # bytes of mini-batches and of the sampler's scratch memory
    bulk: int = 1  # mini-batches per sampling launch
    hit_rate: float = 1.0  # fraction of the read bytes that avoids the bus; bytes from other GPUs count nine tenths
    num_batches: int = 0  # pre-sampled mini-batches; 0 if everything fits

    @property
    def nbytes(self) -> int:
        """Total bytes on the device."""
        return self.fixed + self.buffers + sum(part.nbytes + part.cache_bytes for part in self.parts)

    def __getitem__(self, name: str) -> ArrayPlacement:
        """Return the placement of an array by its name."""
        return next(part for part in self.parts if part.name == name)

    def rate(self, parts: Sequence[PlacedArray]) -> float:
        """Return the fraction of the read cost that is saved, for any access counts of the same arrays."""
        total = sum(part.reads for part in parts)
        saved = sum(placed.saved(part) for placed, part in zip(self.parts, parts, strict=True))
        return min(1.0, saved / total) if total else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the plan's numbers as a JSON-serializable dictionary."""
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
        items = []
        for part in self.parts:
            size = shown(part.nbytes + part.cache_bytes)
            suffix = {"pinned": " (the rest in host memory)", "shard": f" (a shard on each of {part.gpus} GPUs)"}
            items.append(f"{part.name} {size}{suffix.get(part.place, '')}")
        items.append(f"mini-batches {shown(self.buffers)}" + (f", {self.bulk} per launch" if self.bulk > 1 else ""))
        items += [f"other attributes {shown(self.fixed)}"] if self.fixed else []
        summary = f"{shown(self.nbytes)} of {shown(self.memory)} on the device: {'; '.join(items)}"
        if not self.num_batches:
            return summary
        source = f"estimated from {self.num_batches} pre-sampled mini-batches"
        return f"{summary}\n{self.hit_rate:.0%} of the bytes that mini-batches read are on the device, {source}"


def place_parts(
    parts: Sequence[PlacedArray], memory: int, *, buffers: int = 0, fixed: int = 0, cache_bytes: int | None = None
) -> Placement:
    """Choose placements and caches of topology and tables, to maximize the reads served from device memory.

    Source: DUCATI's benefit of the next entry per byte, extended to whole tables and to mini-batches. A quarter of the
    memory is reserved for the model, unless the placements that the user requested need it.
    """
    # Sharding an array needs a known shard size; on one GPU it equals placing it on the device.
    for part in parts:
        if part.place == "shard" and part.shard_bytes is None and part.gpus > 1:
            raise ValueError(f"{part.name} cannot be sharded across {part.gpus} GPUs; place it 'device' or 'pinned'")
    requested = {n: "device" if p.place == "shard" and p.gpus == 1 else p.place for n, p in enumerate(parts)}
    # Compare the bytes that are on the device in any case with the free memory.
    least = buffers + fixed
    least += sum(p.pinned_bytes if requested[n] == "auto" else p.bytes_at(requested[n]) for n, p in enumerate(parts))
    if least > memory:
        on_device = [(n, part) for n, part in enumerate(parts) if requested[n] in ("device", "shard")]
        sizes = [f"{part.name} {shown(part.bytes_at(requested[n]))}" for n, part in on_device]
        raise ValueError(
            f"the device needs {shown(least)}, but has {shown(memory)} free: "
            f"{', '.join([*sizes, f'mini-batches {shown(buffers)}', f'other attributes {shown(fixed)}'])}; place "
            "topology or features 'auto' or 'pinned', or make prefetch, bulk or the mini-batches smaller"
        )
    # The model gets its reserve unless the requested placements need it.
    limit = max(least, memory - int(MODEL_FRACTION * memory))
    # Arrays that may be pinned, have access counts and no fixed cache compete for the caches.
    hot = [n for n, part in enumerate(parts) if requested[n] in ("auto", "pinned") and part.hot and part.cached is None]
    order = CacheOrder([cacheable for number in hot if (cacheable := parts[number].hot) is not None])
    free = [number for number in requested if requested[number] == "auto"]
    # Try every combination of placements, and divide the remaining memory among the caches of pinned arrays.
    best: tuple[float, Any] = (-1.0, None)
    for chosen in _enumerate_placements(free, parts):
        places = requested | chosen
        used = least + sum(parts[n].bytes_at(place) - parts[n].pinned_bytes for n, place in chosen.items())
        saved = sum(_pin(part).saved(part) for n, part in enumerate(parts) if places[n] == "pinned")
        saved += sum(parts[n].saved_at(place) for n, place in places.items())
        # Skip combinations that do not fit, or that could not win even if every read of cacheable arrays were a hit.
        most = saved + sum(parts[number].reads for number in hot if places[number] == "pinned")
        if used > limit or most <= best[0]:
            continue
        left = limit - used if cache_bytes is None else min(cache_bytes, limit - used)
        caches = order.best(left, [index for index, number in enumerate(hot) if places[number] == "pinned"])
        saved += sum(caches.gains)
        if saved > best[0]:
            best = saved, (places, caches)
    places, caches = best[1]
    # Describe the best combination, with the rows in each cache.
    placed = []
    for number, part in enumerate(parts):
        if places[number] != "pinned":
            placed.append(ArrayPlacement(part.name, places[number], part.bytes_at(places[number]), gpus=part.gpus))
        elif number in hot:
            index = hot.index(number)
            placed.append(replace(_pin(part), nodes=caches.nodes[index], cache_bytes=caches.nbytes[index]))
        else:
            placed.append(_pin(part))
    plan = Placement(memory, tuple(placed), fixed, buffers)
    return replace(plan, hit_rate=plan.rate(parts))


def _pin(part: PlacedArray) -> ArrayPlacement:
    """Place an array in host memory, with only its fixed cache, if any."""
    return ArrayPlacement(part.name, "pinned", part.pinned_bytes, _EMPTY_INT64 if part.cached is None else part.cached)


def _enumerate_placements(free: Sequence[int], parts: Sequence[PlacedArray]) -> Iterator[dict[int, str]]:
    """Yield combinations, the most on the device first: at equal cost, they do not depend on a cache's estimate."""
    shardable = [number for number in free if parts[number].shard_bytes is not None and parts[number].gpus > 1]
    # All combinations of up to six arrays. Of more: the arrays read most per byte, with or without each one of them,
    # and prefixes of the others sharded.
    if len(free) <= 6:
        options = [("device", "shard", "pinned") if number in shardable else ("device", "pinned") for number in free]
        rank = {"device": 0, "shard": 1, "pinned": 2}
        for places in sorted(product(*options), key=lambda chosen: sum(rank[place] for place in chosen)):
            yield dict(zip(free, places, strict=True))
        return
    order = sorted(free, key=lambda number: -parts[number].reads / max(parts[number].nbytes, 1))
    for size in range(len(order), -1, -1):
        for without in (None, *order[:size]):
            on_device = {number: "device" for number in order[:size] if number != without}
            others = [number for number in order if number not in on_device and number in shardable]
            for count in range(len(others), -1, -1):
                yield dict.fromkeys(free, "pinned") | dict.fromkeys(others[:count], "shard") | on_device

"""Mini-batches for several trainers at once: HyScale-GNN's four-stage pipeline (section III) around a PyG loader."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise, takewhile
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.loader import NodeLoader

from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling
from lightning_gnn.ops import batch_key
from lightning_gnn.runtime.devices import used_on, works
from lightning_gnn.runtime.pipeline import Item, StagePipeline, Step
from lightning_gnn.runtime.timeline import profiled
from lightning_gnn.sampling.loader import PreparationTimes, Prepared, ThreadedNodeLoader
from lightning_gnn.sampling.neighbor import SeedRange

GLOBAL_RANDOM = threading.Lock()
"""Held by who uses torch's global CPU generator in a thread: PyG's samplers, and dropout that takes no other one."""


class HybridBatch:
    """What one iteration trains on: a mini-batch for each trainer.

    Not a list or dataclass, so that Lightning leaves it alone. Callbacks see it where they would see a batch.

    Args:
        parts: Mini-batch of each trainer, None for one without seeds.
        seeds: Their numbers of seeds.
        total: Seeds of all nodes together.
        number: Position in the epoch.
        seconds: Thread-seconds that each stage has spent on it.
        sampled_there: Seeds of the parts that accelerators have sampled; None where they do not sample.
    """

    def __init__(
        self,
        parts: list[Any],
        seeds: list[int],
        total: int,
        number: int = 0,
        seconds: dict[str, float] | None = None,
        sampled_there: int | None = None,
    ) -> None:
        self.parts = parts
        self.seeds = seeds
        self.total = total
        self.number = number
        self.seconds = seconds or {}
        self.sampled_there = sampled_there

    @property
    def batch_size(self) -> int:
        """Seeds of this node."""
        return sum(self.seeds)

    @property
    def num_edges(self) -> int:
        """Edges of all mini-batches."""
        return sum(int(part.num_edges) for part in self.parts if part is not None)

    @property
    def num_nodes(self) -> int:
        """Vertices of all mini-batches."""
        return sum(int(part.num_nodes) for part in self.parts if part is not None)

    @property
    def active(self) -> list[int]:
        """The trainers that have a mini-batch."""
        return [trainer for trainer, part in enumerate(self.parts) if part is not None]

    @property
    def is_trained(self) -> bool:
        """Whether an attribute requires gradients."""
        stores = (store for part in self.parts if part is not None for store in part.stores)
        return any(isinstance(value, Tensor) and value.requires_grad for store in stores for value in store.values())

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield one tensor with a row per seed: from it Lightning takes the batch size for ``self.log``."""
        yield torch.empty(self.batch_size, 0)

    def __repr__(self) -> str:
        return f"HybridBatch(seeds={self.seeds}, num_edges={self.num_edges})"


@dataclass
class PipelineSettings:
    """How a :class:`HybridLoader` runs.

    Args:
        devices: Where the mini-batch of each trainer goes; None leaves it to whoever takes it.
        prefetch: 0 prepares a mini-batch when it is asked for; 1 prefetches, with Feature Loading and Data Transfer as
            one stage; 2 makes two stages of them (section V-B).
        threads: Threads of Sampling and of Feature Loading.
        stall_timeout: Seconds without progress after which it gives up.
        transfer_dtype: ``"float16"`` or ``"int8"``: features travel to accelerators so; None: as they are.
        dtype: What floating attributes are converted to.
    """

    devices: Sequence[torch.device | None]
    prefetch: int = 2
    threads: tuple[int, int] = (1, 1)
    stall_timeout: float = 300.0
    transfer_dtype: str | None = None
    dtype: torch.dtype | None = None


@dataclass
class _Note:
    """What the stages know about an iteration."""

    number: int
    key: int
    seeds: list[int] = field(default_factory=list)
    total: int = 0
    firsts: list[int] = field(default_factory=list)
    places: list[int | None] | None = None
    sampled: list[float] = field(default_factory=list)


def split_seeds(num_seeds: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """Cut seeds into consecutive ranges in proportion to weights, one of which may be empty.

    Args:
        num_seeds: How many.
        weights: Not negative, not all zero. Integers that add up to ``num_seeds`` are met exactly.
    """
    whole = sum(weights)
    cuts, before = [0], 0.0
    for weight in weights:
        before += weight
        cuts.append(min(num_seeds, int(num_seeds * before / whole + 0.5)))
    cuts[-1] = num_seeds
    return list(pairwise(cuts))


class HybridLoader:
    """Wraps a PyG node loader: each of its mini-batches becomes one per trainer, prepared ahead in four stages.

    Seeds come in the loader's own order. With this package's loaders all parts of an iteration are sampled with the
    key of the whole, so a node's neighbours (if disjoint, a seed's tree) do not depend on which trainer got it. PyG's
    own samplers draw from torch's global generator, and with more than one thread of Sampling their order is open.

    Args:
        loader: The loader.
        split: Called with the number of seeds of an iteration and its position in the epoch; returns the range of each
            trainer of this node.
        settings: How to run.
        first_batch: Tells how many iterations of the epoch to leave out; by default the loader's own answer.
        num_batches: Tells how many there are, for an epoch that ends early.
        on_epoch: Called with the first seeds of an epoch before it begins.
        sampling: What samples on accelerators, for one of this package's loaders; the mini-batches do not depend on it.
        share: Called after each ``split``; returns which share of this iteration's sampling accelerators do.

    Raises:
        TypeError: It is no PyG node loader.
        ValueError: It yields single seeds, or has no length.
    """

    def __init__(
        self,
        loader: NodeLoader,
        split: Callable[[int, int], list[tuple[int, int]]],
        settings: PipelineSettings,
        first_batch: Callable[[], int] | None = None,
        num_batches: Callable[[], float] | None = None,
        on_epoch: Callable[[list[int]], None] | None = None,
        sampling: AcceleratorSampling | None = None,
        share: Callable[[], float] = lambda: 0.0,
    ) -> None:
        check_loader(loader)
        self.loader = loader
        self.split = split
        self.settings = settings
        self.first_batch = getattr(loader, "first_batch", None) or first_batch
        self.num_batches = num_batches
        self.on_epoch = on_epoch
        self.sampling = sampling
        self.share = share
        self.times = PreparationTimes()
        self.order_state: Tensor | None = None
        """State of torch's generator from which the order of the present epoch was drawn."""
        self.resumed: tuple[Tensor, Tensor] | None = None
        """From which the order of a resumed epoch is to be drawn, and the generator's state with which to go on."""
        self.epoch = 0
        self._iterator: _HybridIterator | None = None
        ours = isinstance(loader, ThreadedNodeLoader)
        self._finishes = ours and loader.finishes
        if ours and loader.in_training_thread:
            settings.prefetch = 0
        self._transfers = [
            None if device is None else Transfer(device, settings.transfer_dtype) for device in settings.devices
        ]

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[HybridBatch]:
        self.close()
        self._iterator = _HybridIterator(self)
        return self._iterator

    def __getattr__(self, name: str) -> Any:
        """Be like the loader otherwise: dataset, sampler, batch_sampler, num_workers and so on."""
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def resize(self, threads: tuple[int, int]) -> None:
        """Change the threads of Sampling and Feature Loading, also of an epoch under way."""
        self.settings.threads = threads
        if self._iterator is not None:
            self._iterator.resize()

    def close(self) -> list[str]:
        """Stop preparing and join the threads; return the names of those that hang."""
        iterator, self._iterator = self._iterator, None
        return [] if iterator is None else iterator.close()

    def stages(self) -> list[list[tuple[str, Step]]]:
        """Return the steps of each stage; one that does not exist is left out."""
        stages: list[list[tuple[str, Step]]] = [[("sample", self._sample)], [("load", self._load)]]
        if self.sampling is not None:
            # In front of the CPU's, which sees other iterations meanwhile: side by side in effect.
            stages.insert(0, [("sample_accelerator", self._sample_there)])
        if self._finishes:
            return stages  # the training thread does the rest
        if any(transfer is not None for transfer in self._transfers):
            transfer: tuple[str, Step] = ("transfer", self._transfer)
            if self.settings.prefetch >= 2:
                stages.append([transfer])
            else:
                stages[-1].append(transfer)
        return stages

    def stage_threads(self) -> list[int]:
        """Return the threads of each stage."""
        sampling, loading = self.settings.threads
        ordered = not isinstance(self.loader, ThreadedNodeLoader) and torch.are_deterministic_algorithms_enabled()
        there = [] if self.sampling is None else [len(self.sampling)]
        return [*there, 1 if ordered else sampling, loading, 1][: len(self.stages())]

    def item(self, number: int, index: list[int]) -> Item:
        """Begin an iteration: share out its seeds."""
        loader = self.loader
        key = 0
        if isinstance(loader, ThreadedNodeLoader):
            key = batch_key(loader.seed, loader.rank, loader.loader_id, self.epoch, number)
        ranges = self.split(len(index), number)
        note = _Note(number, key, [stop - start for start, stop in ranges], len(index), [start for start, _ in ranges])
        parts: list[Any] = [index[start:stop] or None for start, stop in ranges]
        if not any(note.seeds):
            parts[0] = index[:1]  # all went to other nodes, with which this one must stay in step; it counts nothing
        if self.sampling is not None:
            note.places = self.sampling.assign(note.seeds, self.share(), number)
        return Item(parts, note)

    def batch(self, item: Item) -> HybridBatch:
        """Finish an iteration."""
        note, there = item.note, None
        for part, prepared in enumerate(item.parts):
            if isinstance(prepared, Prepared):
                batch = converted(self.loader.finish(prepared, part), self.settings.dtype)
                item.parts[part] = self._transfer(part, batch, note)
        if self.sampling is not None:
            there = sum(n for n, place in zip(note.seeds, note.places, strict=True) if place is not None)
            item.seconds["sample_accelerator"] = sum(note.sampled)  # without waiting for a turn
        return HybridBatch(item.parts, note.seeds, note.total, note.number, item.seconds, there)

    @profiled("accelerator_sampling")
    def _sample_there(self, part: int, index: list[int], note: _Note) -> Any:
        place = None if note.places is None else note.places[part]
        if self.sampling is None or place is None:
            return index
        inputs = SeedRange(self.loader.input_data[index], note.firsts[part])
        out, seconds = self.sampling.sample(place, inputs, note.key)
        note.sampled.append(seconds)
        return out

    def _sample(self, part: int, index: Any, note: _Note) -> Any:
        if note.places is not None and note.places[part] is not None:
            return index  # accelerators have done it
        if isinstance(self.loader, ThreadedNodeLoader):
            return self.loader.sample(index, note.key, part, note.firsts[part])
        if self.stage_threads()[0] == 1:
            with GLOBAL_RANDOM:
                return self.loader.collate_fn(index)
        return self.loader.collate_fn(index)

    def _load(self, part: int, out: Any, note: _Note) -> Any:
        if isinstance(self.loader, ThreadedNodeLoader):
            prepared = self.loader.load(out, note.key, part)
            return prepared if self._finishes else converted(prepared.batch, self.settings.dtype)
        # With filter_per_worker PyG's collate_fn has loaded the features already.
        batch = out if self.loader.filter_per_worker else self.loader.filter_fn(out)
        return converted(batch, self.settings.dtype)

    @profiled("transfer")
    def _transfer(self, part: int, batch: Any, note: _Note) -> Any:
        transfer = self._transfers[part]
        return batch if transfer is None else transfer(batch)


class _HybridIterator:
    """Starts at the first ``next``: Lightning asks for the iterator before it sets the epoch."""

    def __init__(self, owner: HybridLoader) -> None:
        self._owner = owner
        self._pipeline: StagePipeline | None = None
        self._begun = False
        self._items: Iterator[Item] = iter(())

    def __iter__(self) -> Iterator[HybridBatch]:
        return self

    def __next__(self) -> HybridBatch:
        owner = self._owner
        start = time.perf_counter()
        if not self._begun:
            self._begin()
        item = next(self._items, None) if self._pipeline is None else self._pipeline.pull(self._items)
        if item is None:
            self.close()
            raise StopIteration
        if self._pipeline is None:
            for part, value in enumerate(item.parts):
                if value is not None:
                    item.add(item.run(part, [step for stage in owner.stages() for step in stage]))
        elif not self._pipeline.in_flight:
            self.close()  # the threads of an epoch end with its last batch
        batch = owner.batch(item)
        sampling = item.seconds.get("sample", 0.0) + item.seconds.get("sample_accelerator", 0.0)
        features, wait = item.seconds.get("load", 0.0), time.perf_counter() - start
        owner.times.add(PreparationTimes(1, batch.num_nodes, batch.num_edges, sampling, features, wait))
        return batch

    def resize(self) -> None:
        if self._pipeline is not None:
            self._pipeline.resize(self._owner.stage_threads())

    def close(self) -> list[str]:
        self._items, self._begun = iter(()), True
        pipeline, self._pipeline = self._pipeline, None
        return [] if pipeline is None else pipeline.close()

    def _begin(self) -> None:
        owner = self._owner
        self._begun = True
        if isinstance(owner.loader, ThreadedNodeLoader):
            owner.epoch = owner.loader.begin_epoch()
        first = 0 if owner.first_batch is None else owner.first_batch()
        last = inf if owner.num_batches is None else owner.num_batches()
        self._items = self._following(first, last)
        if owner.settings.prefetch:
            self._pipeline = StagePipeline(
                owner.stages(), owner.stage_threads(), stall_timeout=owner.settings.stall_timeout, name="hybrid"
            )

    def _seeds(self, first: int) -> Iterator[list[int]]:
        """Yield the seeds of each iteration, in the caller's thread, since it may draw from torch's generator."""
        owner = self._owner
        resumed, owner.resumed = owner.resumed, None
        if resumed is not None:
            torch.set_rng_state(resumed[0] if first else resumed[1])
        owner.order_state = torch.get_rng_state()
        if not isinstance(owner.loader, ThreadedNodeLoader):
            torch.empty((), dtype=torch.int64).random_(
                generator=owner.loader.generator
            )  # as torch's loaders draw first
        order = iter(owner.loader.batch_sampler)
        seeds = next(order, None)
        if resumed is not None and first:
            torch.set_rng_state(resumed[1])
        if owner.on_epoch is not None:
            owner.on_epoch(list(seeds or []))
        number = 0
        while seeds is not None:
            if number >= first:
                yield list(seeds)
            number += 1
            seeds = next(order, None)

    def _following(self, first: int, last: float) -> Iterator[Item]:
        order = self._seeds(first)
        for number in takewhile(lambda number: number < last, count(first)):
            if (seeds := next(order, None)) is None:
                return
            yield self._owner.item(number, seeds)


def check_loader(loader: object) -> None:
    """Refuse a loader whose mini-batches cannot be made in stages.

    Raises:
        TypeError: It is no PyG node loader.
        ValueError: It yields single seeds, or has no length.
    """
    if not isinstance(loader, NodeLoader):
        raise TypeError(
            f"hyscale needs a torch_geometric.loader.NodeLoader for training, such as NeighborLoader or what "
            f"lightning_gnn.NeighborDataModule makes, whose sampling it can share out; it got {type(loader).__name__}"
        )
    if loader.batch_sampler is None:
        raise ValueError("the training loader yields single seeds (batch_size=None); give it a batch_size")
    try:
        len(loader)
    except TypeError:
        raise ValueError("the training loader has no length; give its batch_sampler a __len__") from None


TRANSFER_DTYPES = (None, "float16", "int8")
_FEATURES = "x"


@dataclass
class PackedRows:
    """Feature rows in fewer bits.

    Args:
        values: float16 or int8 ``[n, F]``.
        scales: float32 ``[n, 1]``, the value of 1 in each int8 row; None beside float16.
        dtype: What they were.
    """

    values: Tensor
    scales: Tensor | None
    dtype: torch.dtype

    @classmethod
    def pack(cls, rows: Tensor, dtype: str) -> PackedRows:
        """Round rows to float16, or to int8 with one scale per row: an error of at most scale / 2.

        Raises:
            ValueError: A number does not fit float16, or is not finite.
        """
        if dtype == "float16":
            values = rows.to(torch.float16)
            if not bool(values.isfinite().all()):
                raise ValueError(
                    "transfer_dtype='float16': a feature exceeds 65504 or is not finite; use 'int8' or None"
                )
            return cls(values, None, rows.dtype)
        largest = rows.abs().amax(dim=1, keepdim=True).to(torch.float32)
        if not bool(largest.isfinite().all()):
            raise ValueError("transfer_dtype='int8': a feature is not finite; use None")
        scales = largest / 127.0
        values = (rows / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-127, 127)
        return cls(values.to(torch.int8), scales, rows.dtype)

    def unpack(self) -> Tensor:
        """Return rows of the dtype that they had."""
        if self.scales is None:
            return self.values.to(self.dtype)
        return (self.values.to(torch.float32) * self.scales).to(self.dtype)


class Transfer:
    """The stage Data Transfer (section V-B): copies a batch to a device, through pinned memory and on its own stream.

    A call returns when the batch has arrived, so it needs no synchronisation by whoever trains on it.

    Args:
        device: Where to.
        dtype: ``"float16"`` or ``"int8"``: features ``x`` travel so, and are what they were on arrival.
    """

    def __init__(self, device: torch.device, dtype: str | None = None) -> None:
        self.device = device
        self.dtype = dtype
        self._stream: Any = None
        self._pins = self._probed = False

    def __call__(self, batch: BaseData) -> BaseData:
        """Move a batch of PyG, homogeneous or heterogeneous."""
        packed: dict[int, PackedRows] = {}
        for place, store in enumerate(batch.stores):
            if self._packs(store):
                packed[place] = PackedRows.pack(store[_FEATURES], str(self.dtype))
                store[_FEATURES] = packed[place].values
        batch = self._move(batch)
        for place, rows in packed.items():
            store = batch.stores[place]
            scales = None if rows.scales is None else rows.scales.to(self.device)
            store[_FEATURES] = PackedRows(store[_FEATURES], scales, rows.dtype).unpack()
        return batch

    def _packs(self, store: Any) -> bool:
        if self.dtype is None or _FEATURES not in store:
            return False
        rows = store[_FEATURES]
        return isinstance(rows, Tensor) and rows.is_floating_point() and rows.dim() == 2

    def _move(self, batch: BaseData) -> BaseData:
        if self.device.type == "cpu":
            return batch.to(self.device)
        if not self._probed:
            self._probed = True
            self._pins = works(lambda: torch.empty(1).pin_memory())
            if works(lambda: torch.Stream(self.device).record_event().synchronize()):
                self._stream = torch.Stream(self.device)
        if self._pins:
            batch = batch.apply(_pinned)
        if self._stream is None:
            return batch.to(self.device)
        with self._stream:
            batch = batch.to(self.device, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()
        # Its memory belongs to this stream, but is used on another one.
        consumer = torch.accelerator.current_stream(self.device)
        return batch.apply(lambda tensor: used_on(tensor, consumer))


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.is_cpu and not tensor.is_pinned() else tensor


def converted(batch: Any, dtype: torch.dtype | None) -> Any:
    """Return a batch of PyG with floating attributes of another dtype, which Lightning's precision plugins leave out.

    Args:
        batch: Anything; only batches of PyG are changed.
        dtype: None changes nothing.
    """
    if dtype is None or not isinstance(batch, BaseData):
        return batch
    return batch.apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

"""One rank's part of every mini-batch: HyScale-GNN's pipeline (section III), or the user's own loader, of slices."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler
from torch_geometric.data.data import BaseData

from lightning_gnn.hyscale.accelerator_sampling import AcceleratorSampling
from lightning_gnn.hyscale.transfer import Transfer
from lightning_gnn.runtime.pipeline import Item, OrderedPipeline, StagePipeline, Step
from lightning_gnn.runtime.precision import converted
from lightning_gnn.runtime.timeline import profiled
from lightning_gnn.sampling.loader import PreparationTimes, Prepared, Slice, Task, ThreadedNodeLoader
from lightning_gnn.sampling.look_ahead import LookAhead
from lightning_gnn.sampling.neighbor import SeedRange


@dataclass
class Share:
    """What this rank has of a mini-batch.

    Args:
        number: Position of the mini-batch in the epoch.
        seeds: Of this rank; with 0 there is a mini-batch of one seed that must not count.
        seconds: Thread-seconds that each stage has spent on it.
        sampled_there: Whether an accelerator has sampled it; None where none does.
    """

    number: int
    seeds: int
    total: int
    seconds: dict[str, float] = field(default_factory=dict)
    sampled_there: bool | None = None


Split = Callable[[int, int], tuple[int, int]]
"""From how many seeds a mini-batch has, and its number in the epoch, to this rank's: the first, and one after the
last."""


def split_seeds(num_seeds: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """Cut seeds into consecutive ranges in proportion to weights.

    Each weight that is not 0 gets a seed, where there are enough.

    Args:
        weights: Not negative, not all zero. Integers that add up to ``num_seeds`` are met exactly.
    """
    whole = sum(weights)
    cuts, before = [0], 0.0
    for weight in weights:
        before += weight
        cuts.append(min(num_seeds, int(num_seeds * before / whole + 0.5)))
    cuts[-1] = num_seeds
    sizes = [stop - start for start, stop in pairwise(cuts)]
    for place, weight in enumerate(weights):
        most = max(range(len(sizes)), key=sizes.__getitem__)
        if weight and not sizes[place] and sizes[most] > 1:
            sizes[place], sizes[most] = 1, sizes[most] - 1
    stops = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


class SharedBatches:
    """A batch sampler that yields this rank's slice of every mini-batch of another one.

    Where the order is drawn at random, rank 0 draws all of an epoch's and tells the others.

    Args:
        loader: The loader whose batch sampler it is.
        split: Tells which seeds are this rank's.
        part: Which part of a mini-batch that is.
        first_batch: Tells how many mini-batches of the epoch to leave out.
        num_batches: Tells how many there are, for an epoch that ends early, or a batch sampler that never does.
        on_epoch: Called with the number of the first mini-batch before it is yielded.
        rank: Of this process, None where it is alone.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        split: Split,
        part: int = 0,
        first_batch: Callable[[], int] = lambda: 0,
        num_batches: Callable[[], float] = lambda: inf,
        on_epoch: Callable[[int], object] = lambda first: None,
        rank: int | None = None,
    ) -> None:
        self.batches: Any = loader.batch_sampler
        self.split = split
        self.part = part
        self.first_batch = first_batch
        self.num_batches = num_batches
        self.on_epoch = on_epoch
        self.shares: deque[Share] = deque()
        """Of the slices that were yielded and whose mini-batches have not come yet."""
        self.order_state: Tensor | None = None
        """State of torch's generator from which the order of the present epoch was drawn; None if it follows from the
        epoch."""
        self.resumed: tuple[Tensor, Tensor] | None = None
        """From which the order of a resumed epoch is to be drawn, and the generator's state with which to go on."""
        self._rank = rank
        sampler = getattr(self.batches, "sampler", None)
        if rank is not None and isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise ValueError(
                f"the loader's {type(sampler).__name__} shares the seeds out among {sampler.num_replicas} processes, "
                "but hyscale shares out every mini-batch itself: leave it out, or set num_replicas=1, rank=0"
            )
        follows = isinstance(sampler, (SequentialSampler, DistributedSampler))
        self._drawn = not (follows and type(self.batches) is BatchSampler)

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        """Be like the batch sampler otherwise: batch_size, drop_last, sampler."""
        if name.startswith("__") or name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __iter__(self) -> Iterator[Slice]:
        self.shares.clear()
        first, last = self.first_batch(), self.num_batches()
        self.on_epoch(first)
        for number, index in enumerate(self._order(first, None if last == inf else int(last))):
            if number >= first:
                yield self.cut(index, number)

    def cut(self, index: list[int], number: int) -> Slice:
        """Return this rank's part of a mini-batch."""
        start, stop = self.split(len(index), number)
        self.shares.append(Share(number, stop - start, len(index)))
        return self._slice(index, start, stop)

    def coming(self, epoch: int, first: int) -> Iterator[Task] | None:
        """Give this rank's parts from a mini-batch on, as far as they are known now; None where the order is drawn."""
        if self._drawn:
            return None
        last = self.num_batches()
        order = islice(enumerate(self.batches), first, None if last == inf else int(last))
        return ((epoch, number, self._slice(index, *self.split(len(index), number))) for number, index in order)

    def _slice(self, index: list[int], start: int, stop: int) -> Slice:
        return Slice(index[start:stop], self.part, start) if stop > start else Slice(index[:1], self.part)

    def _order(self, first: int, last: int | None) -> Iterator[list[int]]:
        """Yield the seeds of each mini-batch before the last."""
        if not self._drawn:
            return islice(self.batches, last)
        resumed, self.resumed = self.resumed, None
        if resumed is not None and first:
            torch.set_rng_state(resumed[0])
        self.order_state = torch.get_rng_state()
        order: Any = [None]
        if self._rank in (None, 0):
            order = [list(index) for index in islice(self.batches, last)]
        if self._rank is not None:
            # With the stream after it, so that what hooks draw is the same on all ranks again.
            told = [order, torch.get_rng_state()]
            dist.broadcast_object_list(told, 0)
            order = told[0]
            torch.set_rng_state(told[1])
        if resumed is not None and first:
            torch.set_rng_state(resumed[1])
        return iter(order)


class SlicedLoader:
    """A torch ``DataLoader`` of any kind, whose mini-batches are made of this rank's slices.

    Args:
        loader: Has a batch sampler over a dataset with positions.
        on_batch: Called with the share of each mini-batch before it is handed out.
        transfer: Brings mini-batches to a device, one ahead; None leaves that to the training thread.
        dtype: What floating attributes are converted to.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: SharedBatches,
        on_batch: Callable[[Share], None],
        transfer: Transfer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.loader = copy.copy(loader)
        vars(self.loader)["batch_sampler"] = batches  # DataLoader refuses to have it set, but reads it at each epoch
        self.loader.in_order = True  # each share belongs to its mini-batch
        self.batches = batches
        self.transfer = transfer
        self._on_batch = on_batch
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        made: Iterator[Any] = iter(self.loader)
        if self.transfer is not None:
            made = OrderedPipeline(made, self._moved, 1, 2)
        for batch in made:
            self._on_batch(self.batches.shares.popleft())
            yield batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def resize(self, threads: tuple[int, int]) -> None:
        """Leave the numbers of worker processes or threads as they are."""

    def close(self) -> list[str]:
        """Leave the worker processes to the loader."""
        return []

    def _moved(self, batch: Any) -> Any:
        assert self.transfer is not None
        return self.transfer(converted(batch, self._dtype)) if isinstance(batch, BaseData) else batch


class WholeLoader:
    """A loader whose mini-batches cannot be shared out: rank 0 has all of each, the others have no seeds.

    Args:
        on_batch: Called with the share of each mini-batch before it is handed out.
    """

    def __init__(self, loader: Any, on_batch: Callable[[Share], None], rank: int) -> None:
        self.loader = loader
        self._on_batch = on_batch
        self._seeds = int(rank == 0)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            self._on_batch(Share(number, self._seeds, 1))
            yield batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class SizedWholeLoader(WholeLoader):
    """A :class:`WholeLoader` that has a length."""

    def __len__(self) -> int:
        return len(self.loader)


def whole_loader(loader: Any, on_batch: Callable[[Share], None], rank: int) -> WholeLoader:
    """Return one with a length where the loader has one."""
    try:
        len(loader)
    except TypeError:
        return WholeLoader(loader, on_batch, rank)
    return SizedWholeLoader(loader, on_batch, rank)


@dataclass
class PipelineSettings:
    """How a :class:`StagedLoader` runs.

    Args:
        prefetch: 0 prepares a mini-batch when it is asked for; 1 prefetches, with Feature Loading and Data Transfer as
            one stage; 2 makes two stages of them (section V-B).
        threads: Threads of Sampling and of Feature Loading.
        ahead: Mini-batches under way at most.
        stall_timeout: Seconds without progress after which it gives up.
        dtype: What floating attributes are converted to.
    """

    prefetch: int = 2
    threads: tuple[int, int] = (1, 1)
    ahead: int = 6
    stall_timeout: float = 300.0
    dtype: torch.dtype | None = None


class StagedLoader:
    """One of this package's node loaders, whose mini-batches are prepared ahead in the paper's stages.

    All ranks sample with the key of the whole mini-batch, so a node's neighbours (if disjoint, a seed's tree) do not
    depend on which rank got it.

    Args:
        on_batch: Called with the share of each mini-batch before it is handed out.
        transfer: Brings mini-batches to a device; None leaves that to the training thread.
        sampling: Samples on this rank's accelerator; the mini-batches do not depend on it.
        share: Returns the part of this rank's sampling that its accelerator does.
    """

    def __init__(
        self,
        loader: ThreadedNodeLoader,
        batches: SharedBatches,
        settings: PipelineSettings,
        on_batch: Callable[[Share], None],
        transfer: Transfer | None = None,
        sampling: AcceleratorSampling | None = None,
        share: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.loader = loader
        self.batches = batches
        self.settings = settings
        self.transfer = transfer
        self.sampling = sampling
        self.times = PreparationTimes()
        self._share = share
        self._on_batch = on_batch
        self._pipeline: StagePipeline | None = None
        self._look_ahead: LookAhead | None = None
        self._finishes = loader.finishes
        if loader.in_training_thread:
            settings.prefetch = 0
        if not hasattr(loader.batch_sampler, "__len__"):
            settings.ahead = max(1, settings.ahead - 1)  # Lightning takes one more of loaders without a length

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Be like the loader otherwise: dataset, sampler, num_workers and so on."""
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        """Prepare from the first ``next`` on: Lightning asks for the iterator before it sets the epoch."""
        self.close()
        epoch = self.loader.begin_epoch()
        items = self._items(epoch)
        pipeline = None
        if self.settings.prefetch:
            pipeline = self._pipeline = StagePipeline(
                self.stages(), self._threads(), stall_timeout=self.settings.stall_timeout, name="hyscale"
            )
        while True:
            start = time.perf_counter()
            item = next(items, None) if pipeline is None else pipeline.pull(items, self.settings.ahead)
            if item is None:
                break
            if pipeline is None:
                item.add(item.run(0, [step for stage in self.stages() for step in stage]))
            elif not pipeline.in_flight:
                self.close()  # the threads of an epoch end with its last mini-batch
            batch, share = self._finished(item), item.note.share
            sampling = item.seconds.get("sample", 0.0) + item.seconds.get("sample_accelerator", 0.0)
            features, wait = item.seconds.get("load", 0.0), time.perf_counter() - start
            self.times.add(PreparationTimes(1, batch.num_nodes, batch.num_edges, sampling, features, wait))
            share.seconds = item.seconds
            self._on_batch(share)
            yield batch
        self.close()

    def resize(self, threads: tuple[int, int]) -> None:
        """Change the threads of Sampling and Feature Loading, also of an epoch under way."""
        self.settings.threads = threads
        if self._pipeline is not None:
            self._pipeline.resize(self._threads())

    def close(self) -> list[str]:
        """Stop preparing and join the threads; return the names of those that hang."""
        pipeline, self._pipeline = self._pipeline, None
        look_ahead, self._look_ahead = self._look_ahead, None
        hanging = [] if pipeline is None else pipeline.close()
        if look_ahead is not None and not hanging:
            look_ahead.close()
        return hanging

    def stages(self) -> list[list[tuple[str, Step]]]:
        """Return the steps of each stage; one that does not exist is left out."""
        stages: list[list[tuple[str, Step]]] = [[("sample", self._sample)], [("load", self._load)]]
        if self.sampling is not None:
            # In front of the CPU's, which sees other mini-batches meanwhile: side by side in effect.
            stages.insert(0, [("sample_accelerator", self._sample_there)])
        if not self._finishes and self.transfer is not None:  # else the training thread does the rest
            if self.settings.prefetch >= 2:
                stages.append([("transfer", self._moved)])
            else:
                stages[-1].append(("transfer", self._moved))
        return stages

    def _threads(self) -> list[int]:
        there = [] if self.sampling is None else [1]
        return [*there, *self.settings.threads, 1][: len(self.stages())]

    def _items(self, epoch: int) -> Iterator[Item]:
        """Give what passes through the stages, and sample ahead where rows are on disk.

        Not where an accelerator samples, whose mini-batches would be sampled by the CPU, too.
        """
        for place, index in enumerate(self.batches):
            share = self.batches.shares.popleft()
            task = epoch, share.number, index
            if self.sampling is not None:
                share.sampled_there = self.sampling.takes(share.number, self._share())
            elif not place and (coming := self.batches.coming(epoch, share.number)) is not None:
                self._look_ahead = self.loader.look_ahead(coming, share.number)
            yield Item([index], _Note(self.loader.key_of(task), share, task))

    def _finished(self, item: Item) -> Any:
        (made,) = item.parts
        return converted(self.loader.finish(made), self.settings.dtype) if isinstance(made, Prepared) else made

    @profiled("accelerator_sampling")
    def _sample_there(self, part: int, index: Slice, note: _Note) -> Any:
        if self.sampling is None or not note.share.sampled_there:
            return index
        inputs = self.loader.input_data[index]
        return self.sampling.sample(SeedRange(inputs, index.first) if index.first else inputs, note.key)

    def _sample(self, part: int, index: Any, note: _Note) -> Any:
        if not isinstance(index, Slice):
            return index  # the accelerator has done it
        if (look_ahead := self._look_ahead) is not None:
            return look_ahead.drawn(note.share.number, note.task).out
        return self.loader.sample(index, note.key, index.part, index.first)

    def _load(self, part: int, out: Any, note: _Note) -> Any:
        if (look_ahead := self._look_ahead) is not None:
            look_ahead.read(note.share.number)
        prepared = self.loader.load(out, note.key, self.batches.part)
        return prepared if self._finishes else converted(prepared.batch, self.settings.dtype)

    @profiled("transfer")
    def _moved(self, part: int, batch: Any, note: _Note) -> Any:
        return batch if self.transfer is None else self.transfer(batch)


@dataclass
class _Note:
    """What the stages know about a mini-batch: its key, this rank's share, and what it is made of."""

    key: int
    share: Share
    task: Task


def can_be_cut(loader: object) -> bool:
    """Whether a loader's mini-batches are made of positions in a dataset, of which each rank can take some."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )

"""One copy per machine of the large tensors that its ranks hold, however the ranks were started.

The first rank of a machine writes a tensor to a file in memory; every rank that holds the same bytes maps that file
copy-on-write, and lets its tensor, which stays the same object, refer to the mapping. A page that a rank writes to
becomes its own; NumPy arrays and views that the user made before keep the old memory.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import platform
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any
from weakref import finalize

import torch
import torch.distributed as dist
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch_geometric.data.data import BaseData

from lightning_gnn.runtime.store import say_once

MIN_SHARED_BYTES = 1 << 20
"""Smaller tensors are left alone."""
_OWN_MEMORY = (
    "lightning_gnn.distributed.heartbeat", "lightning_fabric.", "pytorch_lightning.", "lightning.", "tqdm.", "rich.",
    "tensorboard.", "wandb.", "mlflow.",
)  # fmt: skip
"""Modules whose threads write to no tensor of the user's: observers, progress bars, loggers."""
Offer = tuple[int, int, tuple[int, int]] | str
"""Process, descriptor, and device and inode of a file, or why it is missing."""
_files: dict[int, int] = {}
"""Descriptors of the files that tensors of this process are mapped from, by where their memory begins."""


def share_equal_arrays(held: Mapping[str, Any]) -> int:
    """Let the ranks of each machine use one copy of the tensors that are equal on them; return the bytes shared.

    Collective: every rank must call this. ``held`` has the same names on all ranks: tensors, PyG's ``Data``,
    dataclasses, mappings and tuples. Tensors that are small (:data:`MIN_SHARED_BYTES`), sparse, trained, on a device,
    page-locked or mapped stay, and all of a rank with another thread that may write to them.
    """
    machine, mine, why = which_machine(), {}, ""
    if machine is not None and (writers := other_threads()):
        machine, why = None, f"the threads {', '.join(writers)} of this process may write to them meanwhile"
    try:
        mine = find_tensors(held) if machine is not None else {}
    except Exception as error:  # the others wait for an answer, and no run need end for want of this
        why = str(error)
    sizes = {name: tensors[0].untyped_storage().nbytes() for name, tensors in mine.items()}
    everyone = _gather((machine, sizes, why))
    for rank, (_, _, reason) in enumerate(everyone):
        if reason:
            say_once(f"rank {rank} has a copy of graph and features of its own: {reason}")
    # One after the other, so that no more than one tensor is there twice.
    outcomes = [_share(name, mine.get(name, ()), everyone) for name in sorted({n for _, s, _ in everyone for n in s})]
    if total := sum(saved for _, saved in outcomes):
        rank_zero_info(f"The ranks of a machine use one copy of graph and features: {total / 1e9:.2f} GB saved")
    return sum(own for own, _ in outcomes)


def find_tensors(held: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Return the tensors that can be shared, by the name of the first one on each memory."""
    starts, ends = _mapped_files()
    found: dict[int, tuple[str, list[Tensor]]] = {}
    for name, tensor in _tensors(held):
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        at = bisect_right(starts, begin) - 1
        if storage.nbytes() < MIN_SHARED_BYTES or (at >= 0 and begin < ends[at]):
            continue
        if not (storage.is_shared() or tensor.is_inference() or tensor.is_pinned()):
            found.setdefault(begin, (name, []))[1].append(tensor)
    return dict(found.values())


def shared_view(tensor: Tensor) -> Tensor | None:
    """Return the same content in the memory that all ranks share, to be locked and not written; None if not shared.

    A driver that locks pages counts as a writer: to lock the tensor itself would copy it for each rank.
    """
    storage = tensor.untyped_storage()
    if (file := _files.get(storage.data_ptr())) is None:
        return None
    view = _on(_mapped(file, storage.nbytes(), shared=True), tensor)
    return view if torch.equal(view, tensor) else None


def other_threads() -> list[str]:
    """Return the names of Python threads that may write to a tensor while its memory is copied to a file."""
    here = threading.current_thread()
    found = []
    for thread in threading.enumerate():
        runs = type(thread) if type(thread) is not threading.Thread else getattr(thread, "_target", None)
        if thread is not here and not str(getattr(runs, "__module__", "")).startswith(_OWN_MEMORY):
            found.append(thread.name)
    return found


def which_machine() -> tuple[Any, ...] | None:
    """Return what identifies a machine, container and user, within which files can be opened; None: no sharing."""
    try:
        if platform.system() != "Linux":
            return None
        if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            return None  # then each mapping counts as if all of it were written to
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.readlink("/proc/self/ns/pid"), os.geteuid(), mmap.PAGESIZE
    except OSError:
        return None


def _share(name: str, tensors: Sequence[Tensor], everyone: list[Any]) -> tuple[int, int]:
    """Share the memory of one name on each machine; return the bytes shared here, and saved on all machines."""
    # Group the ranks that hold an array of this name and size by their machine.
    rank = dist.get_rank()
    machine, sizes, _ = everyone[rank]
    holders: dict[tuple[Any, int], list[int]] = {}
    for other, (where, theirs, _) in enumerate(everyone):
        if name in theirs:
            holders.setdefault((where, theirs[name]), []).append(other)
    # All ranks take part in the collective calls below, or none does.
    outcomes: list[bool | str | None] = [None] * len(everyone)
    if any(len(ranks) > 1 for ranks in holders.values()):
        first, *others = holders.get((machine, sizes.get(name, 0)), [-1])
        # The first rank of a machine copies its array to a file in memory, and offers it to the others.
        with ExitStack() as files:
            offer: Offer | None = None
            if gives := bool(others) and first == rank:
                try:
                    file = files.enter_context(file_in_memory())
                    file.write(_bytes(tensors[0]).numpy().data)
                    file.flush()
                    state = os.fstat(file.fileno())
                    offer = os.getpid(), file.fileno(), (state.st_dev, state.st_ino)
                except OSError as error:
                    offer = str(error)
            # The others map the file if its content equals their own array.
            offers = _gather(offer)
            outcomes = _gather(_take(tensors, offers[first]) if rank in others else None)
            # The first rank maps the file too if anybody took it, so that its own copy can be freed.
            if gives and any(outcomes[other] is True for other in others):
                _refer(tensors, file.fileno())
    # Report failures, and add up what was saved.
    _name_others(name, holders, outcomes)
    shares = [(ranks, size) for (_, size), ranks in holders.items() if any(outcomes[other] is True for other in ranks)]
    own = sum(size for ranks, size in shares if rank == ranks[0] or (rank in ranks and outcomes[rank] is True))
    return own, sum(size * sum(outcomes[other] is True for other in ranks) for ranks, size in shares)


def _name_others(name: str, holders: dict[tuple[Any, int], list[int]], outcomes: list[bool | str | None]) -> None:
    """Warn, in the first process, of ranks that hold something else under a name, and of what failed."""
    for (machine, size), ranks in holders.items():
        others = [rank for rank in ranks if outcomes[rank] is False]
        for (where, other_size), them in holders.items():
            if where == machine and other_size != size and ranks[0] < them[0]:
                others += them
        if others:
            say_once(
                f"{name} of rank {', '.join(map(str, sorted(others)))} is not that of rank {ranks[0]}, so each has a "
                "copy of its own; make it from a fixed seed, or read it from one file, if all are to train on the same"
            )
        for why in sorted({found for rank in ranks if isinstance(found := outcomes[rank], str)}):
            say_once(f"not all ranks of a machine use one copy of {name}: {why}")


def file_in_memory() -> IO[bytes]:
    """Open a file without a name, in memory where the system grants that."""
    try:
        return os.fdopen(os.memfd_create("lightning_gnn"), "w+b")
    except OSError:  # not allowed here
        return tempfile.TemporaryFile()


def _take(tensors: Sequence[Tensor], offer: Offer) -> bool | str:
    """Refer to another rank's file; return False where it holds other bytes, or why that cannot be."""
    if isinstance(offer, str):
        return offer
    process, number, identity = offer
    try:
        with open(f"/proc/{process}/fd/{number}", "r+b") as file:
            state = os.fstat(file.fileno())
            if (state.st_dev, state.st_ino) != identity:
                return "its process is another one"
            own = _bytes(tensors[0])
            if not torch.equal(own, _mapped(file.fileno(), own.numel())):
                return False
            _refer(tensors, file.fileno())
    except (OSError, RuntimeError) as error:
        return str(error)
    return True


def _refer(tensors: Sequence[Tensor], file: int) -> None:
    """Let tensors of one storage refer to a file that holds the same bytes, and keep it open as long as they do."""
    whole = _mapped(file, tensors[0].untyped_storage().nbytes())
    for tensor in tensors:
        tensor.data = _on(whole, tensor)
    begin = whole.data_ptr()
    _files[begin] = os.dup(file)
    finalize(whole.untyped_storage(), _close, begin).atexit = False


def _close(begin: int) -> None:
    os.close(_files.pop(begin))


def _mapped(file: int, size: int, shared: bool = False) -> Tensor:
    """Map a file copy-on-write, or as everyone's; uint8 ``[size]``."""
    return torch.from_file(f"/proc/self/fd/{file}", shared, size, dtype=torch.uint8)


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _on(whole: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor like another one, on other memory."""
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(whole.untyped_storage(), *place)


def _tensors(held: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the dense tensors on the host that are not trained."""
    if isinstance(held, BaseData):
        held = held.to_dict()
    elif dataclasses.is_dataclass(held) and not isinstance(held, type):
        held = vars(held)
    elif isinstance(held, tuple):  # no list, which may be a million of texts
        held = dict(enumerate(held))
    if isinstance(held, Mapping):
        for key, value in held.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
        return
    if not isinstance(held, Tensor) or type(held) not in (Tensor, torch.nn.Parameter):
        return  # another class may keep its memory elsewhere
    if held.is_cpu and held.layout == torch.strided and not held.requires_grad:
        yield name, held


def _mapped_files() -> tuple[list[int], list[int]]:
    """Return where the memory of this process that is mapped from files begins and ends, ascending."""
    regions = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, _, *name = line.split(maxsplit=5)
        if name and name[0].startswith("/"):
            regions.append([int(address, 16) for address in addresses.split("-")])
    return [start for start, _ in regions], [end for _, end in regions]


def _gather(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone

"""Share one copy of large equal tensors between the ranks of a machine, however the ranks were started.

The first rank of a machine writes a tensor to a file in memory. Every rank that holds the same bytes maps the file
copy-on-write and points its tensor, which stays the same object, to the mapping. A rank that writes to a page gets a
private copy of it. NumPy arrays and views created before keep the old memory.
"""

from __future__ import annotations

import dataclasses
import logging
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
from torch import Tensor
from torch_geometric.data.data import BaseData

from lightning_gnn.runtime.devices import all_gather_objects
from lightning_gnn.runtime.lightning import rank_zero_info
from lightning_gnn.runtime.store import say_once

log = logging.getLogger(__name__)
MIN_SHARED_BYTES = 1 << 20  # minimum size of a shared tensor
_HARMLESS_MODULES = (
    "lightning_gnn.distributed.heartbeat", "lightning_fabric.", "pytorch_lightning.", "lightning.", "tqdm.", "rich.",
    "tensorboard.", "wandb.", "mlflow.",
)  # fmt: skip
"""Modules whose threads never write to the user's tensors: observers, progress bars, loggers."""
Offer = tuple[int, int, tuple[int, int]] | str
"""Process id, descriptor, and device and inode of a file; or the error that prevented it."""
_files: dict[int, int] = {}  # descriptors of the files that tensors are mapped from, by address of the mapping


def share_equal_arrays(held: Mapping[str, Any]) -> int:
    """Make the ranks of each machine share one copy of the tensors that are equal on them; return the bytes shared.

    ``held`` has the same names on all ranks: tensors, PyG's ``Data``, dataclasses, mappings and tuples. Tensors that
    are small (:data:`MIN_SHARED_BYTES`), sparse, trained, on a device, pinned or mapped are not shared, nor are those
    of a rank with another thread that may write to them. All ranks must call this.
    """
    machine, local, problem = which_machine(), {}, ""
    if machine is not None and (writers := other_threads()):
        machine, problem = None, f"the threads {', '.join(writers)} of this process may write to them meanwhile"
    try:
        local = find_tensors(held) if machine is not None else {}
    except Exception as error:  # do not raise: the other ranks wait in the all-gather, and sharing is optional
        problem = str(error)
    sizes = {name: tensors[0].untyped_storage().nbytes() for name, tensors in local.items()}
    log.debug(f"sharing {len(sizes)} arrays of {sum(sizes.values())} bytes with the ranks of this machine")
    ranks = all_gather_objects((machine, sizes, problem))
    for rank, (_, _, reason) in enumerate(ranks):
        if reason:
            say_once(f"rank {rank} has a copy of graph and features of its own: {reason}")
    # Share one tensor after another, so that at most one occupies memory twice.
    outcomes = [_share(name, local.get(name, ()), ranks) for name in sorted({n for _, s, _ in ranks for n in s})]
    if total := sum(saved for _, saved in outcomes):
        rank_zero_info(f"The ranks of a machine use one copy of graph and features: {total / 1e9:.2f} GB saved")
    return sum(own for own, _ in outcomes)


def find_tensors(held: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Return the tensors that can be shared, grouped by storage, by the name of the first tensor of each storage."""
    starts, ends = _mapped_regions()
    found: dict[int, tuple[str, list[Tensor]]] = {}
    for name, tensor in _iterate_tensors(held):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        region = bisect_right(starts, address) - 1
        if storage.nbytes() < MIN_SHARED_BYTES or (region >= 0 and address < ends[region]):
            continue
        if not (storage.is_shared() or tensor.is_inference() or tensor.is_pinned()):
            found.setdefault(address, (name, []))[1].append(tensor)
    return dict(found.values())


def shared_view(tensor: Tensor) -> Tensor | None:
    """Return a view of the content in the memory that all ranks share, for pinning only; None if not shared.

    A driver that pins pages counts as a writer, so pinning the tensor itself would copy it on each rank.
    """
    storage = tensor.untyped_storage()
    if (file := _files.get(storage.data_ptr())) is None:
        return None
    view = _view_like(_map_file(file, storage.nbytes(), shared=True), tensor)
    return view if torch.equal(view, tensor) else None


def other_threads() -> list[str]:
    """Return the names of Python threads that may write to a tensor while it is copied to a file."""
    current = threading.current_thread()
    names = []
    for thread in threading.enumerate():
        code = type(thread) if type(thread) is not threading.Thread else getattr(thread, "_target", None)
        if thread is not current and not str(getattr(code, "__module__", "")).startswith(_HARMLESS_MODULES):
            names.append(thread.name)
    return names


def which_machine() -> tuple[Any, ...] | None:
    """Return an id of machine, container and user, within which ranks can open each other's files; None: no sharing."""
    try:
        if platform.system() != "Linux":
            return None
        if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            return None  # strict accounting charges each copy-on-write mapping in full
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.readlink("/proc/self/ns/pid"), os.geteuid(), mmap.PAGESIZE
    except OSError:
        return None


def _share(name: str, tensors: Sequence[Tensor], all_ranks: list[Any]) -> tuple[int, int]:
    """Share the memory of one name on each machine; return the bytes shared here, and saved on all machines."""
    # Group the ranks that hold an array of this name and size by their machine.
    rank = dist.get_rank()
    machine, sizes, _ = all_ranks[rank]
    holders: dict[tuple[Any, int], list[int]] = {}
    for other, (other_machine, other_sizes, _) in enumerate(all_ranks):
        if name in other_sizes:
            holders.setdefault((other_machine, other_sizes[name]), []).append(other)
    # All ranks evaluate this condition equally, so they call the collectives below together.
    outcomes: list[bool | str | None] = [None] * len(all_ranks)
    if any(len(ranks) > 1 for ranks in holders.values()):
        first, *others = holders.get((machine, sizes.get(name, 0)), [-1])
        # The first rank of a machine copies its array to a file in memory, and offers it to the others.
        with ExitStack() as files:
            offer: Offer | None = None
            if is_source := bool(others) and first == rank:
                try:
                    file = files.enter_context(file_in_memory())
                    file.write(_bytes(tensors[0]).numpy().data)
                    file.flush()
                    state = os.fstat(file.fileno())
                    offer = os.getpid(), file.fileno(), (state.st_dev, state.st_ino)
                except OSError as error:
                    offer = str(error)
            # The others map the file if its content equals their own array.
            offers: list[Any] = all_gather_objects(offer)
            outcomes = all_gather_objects(_map_if_equal(tensors, offers[first]) if rank in others else None)
            # The first rank maps the file too if another rank uses it, so that its own copy can be freed.
            if is_source and any(outcomes[other] is True for other in others):
                _refer(tensors, file.fileno())
    # Report failures, and add up the bytes saved.
    _warn_unequal(name, holders, outcomes)
    shares = [(ranks, size) for (_, size), ranks in holders.items() if any(outcomes[other] is True for other in ranks)]
    own = sum(size for ranks, size in shares if rank == ranks[0] or (rank in ranks and outcomes[rank] is True))
    return own, sum(size * sum(outcomes[other] is True for other in ranks) for ranks, size in shares)


def _warn_unequal(name: str, holders: dict[tuple[Any, int], list[int]], outcomes: list[bool | str | None]) -> None:
    """Warn, on rank 0, of ranks that hold different content under a name, and of errors."""
    for (machine, size), ranks in holders.items():
        others = [rank for rank in ranks if outcomes[rank] is False]
        for (other_machine, other_size), other_ranks in holders.items():
            if other_machine == machine and other_size != size and ranks[0] < other_ranks[0]:
                others += other_ranks
        if others:
            say_once(
                f"{name} of rank {', '.join(map(str, sorted(others)))} differs from that of rank {ranks[0]}, so each "
                "has its own copy; make it from a fixed seed, or read it from one file, if all should train on the same"
            )
        for problem in sorted({outcome for rank in ranks if isinstance(outcome := outcomes[rank], str)}):
            say_once(f"not all ranks of a machine use one copy of {name}: {problem}")


def file_in_memory() -> IO[bytes]:
    """Open an anonymous file, in memory if the system allows it."""
    try:
        return os.fdopen(os.memfd_create("lightning_gnn"), "w+b")
    except OSError:  # not allowed here
        return tempfile.TemporaryFile()


def _map_if_equal(tensors: Sequence[Tensor], offer: Offer) -> bool | str:
    """Point tensors to another rank's file; return False if its bytes differ, or an error message."""
    if isinstance(offer, str):
        return offer
    process, number, identity = offer
    try:
        with open(f"/proc/{process}/fd/{number}", "r+b") as file:
            state = os.fstat(file.fileno())
            if (state.st_dev, state.st_ino) != identity:
                return f"descriptor {number} of process {process} is another file"
            own = _bytes(tensors[0])
            if not torch.equal(own, _map_file(file.fileno(), own.numel())):
                return False
            _refer(tensors, file.fileno())
    except (OSError, RuntimeError) as error:
        return str(error)
    return True


def _refer(tensors: Sequence[Tensor], file: int) -> None:
    """Point tensors of one storage to a file with the same bytes; it stays open while they use it."""
    mapping = _map_file(file, tensors[0].untyped_storage().nbytes())
    for tensor in tensors:
        tensor.data = _view_like(mapping, tensor)
    address = mapping.data_ptr()
    _files[address] = os.dup(file)
    finalize(mapping.untyped_storage(), lambda: os.close(_files.pop(address))).atexit = False


def _map_file(file: int, size: int, shared: bool = False) -> Tensor:
    """Map a file copy-on-write or shared, as uint8 ``[size]``."""
    return torch.from_file(f"/proc/self/fd/{file}", shared, size, dtype=torch.uint8)


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _view_like(mapping: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with the layout of another one, on the memory of ``mapping``."""
    layout = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(mapping.untyped_storage(), *layout)


def _iterate_tensors(held: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of the dense host tensors that need no gradient, recursively."""
    if isinstance(held, BaseData):
        held = held.to_dict()
    elif dataclasses.is_dataclass(held) and not isinstance(held, type):
        held = vars(held)
    elif isinstance(held, tuple):  # lists are skipped: they may hold millions of strings
        held = dict(enumerate(held))
    if isinstance(held, Mapping):
        for key, value in held.items():
            yield from _iterate_tensors(value, f"{name}.{key}" if name else str(key))
        return
    if not isinstance(held, Tensor) or type(held) not in (Tensor, torch.nn.Parameter):
        return  # a subclass may store its data elsewhere
    if held.is_cpu and held.layout == torch.strided and not held.requires_grad:
        yield name, held


def _mapped_regions() -> tuple[list[int], list[int]]:
    """Return the start and end addresses of the file mappings of this process, ascending."""
    regions = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, _, *name = line.split(maxsplit=5)
        if name and name[0].startswith("/"):
            regions.append([int(address, 16) for address in addresses.split("-")])
    return [start for start, _ in regions], [end for _, end in regions]

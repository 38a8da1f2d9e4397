"""One copy per machine of the arrays that its ranks hold alike, however the ranks were started.

Each rank has read or made its arrays for itself. The first of a machine writes the pages of an array to a file in
memory, and each rank that holds the same bytes maps that file, copy-on-write, over the pages of its own array. The
array stays where it is, so whoever holds it, a view of it or a NumPy array on it sees nothing of this; its pages are
the machine's, until somebody writes to one of them, who gets a copy of that page.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import mmap
import os
import platform
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import IO, Any
from weakref import finalize

import numpy as np
import torch
import torch.distributed as dist
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch_geometric.data.data import BaseData

from lightning_gnn.runtime.store import say_once

LEAST = 1 << 20
"""Smaller arrays, in bytes, are left alone."""
_STEP = 1 << 26
"""So much memory more than before is in use while an array is given to the others."""
_OWN_MEMORY = (
    "lightning_gnn.runtime.heartbeat", "lightning_fabric.", "pytorch_lightning.", "lightning.", "tqdm.", "rich.",
    "tensorboard.", "wandb.", "mlflow.",
)  # fmt: skip
"""Modules whose threads write to no array of the user's: observers, progress bars, loggers."""
_WORD, _FLAGS, _IS_MAPPED = 8, 7, 2
# Of Linux on x86-64 and on 64-bit ARM; Python names not all of them.
_FIXED, _NO_RESERVE, _POPULATE_READ = 0x10, 0x4000, 22
_FAILED = ctypes.c_void_p(-1).value
_files: dict[int, tuple[int, int, int]] = {}
"""What arrays of this process share, by where they begin: the bytes, an open file that holds them, which life it is."""
_lives = count()


@dataclasses.dataclass(frozen=True)
class Block:
    """The whole pages of an array.

    Args:
        start: Address of the first one.
        size: Bytes of them.
        array: Bytes of the array, and how many of them lie before the first whole page.
        owner: What dies with the array's memory.
    """

    start: int
    size: int
    array: tuple[int, int]
    owner: Any = None


@dataclasses.dataclass(frozen=True)
class _Offer:
    """What a rank has moved to a file that it holds open for the others.

    Args:
        process: Its process.
        number: Of the file there.
        identity: What ``stat`` says of the file.
        size: Bytes that could be moved.
        why: What became of the rest.
    """

    process: int = 0
    number: int = 0
    identity: tuple[int, int] = (0, 0)
    size: int = 0
    why: str = ""


def share_equal_arrays(held: Mapping[str, Any]) -> int:
    """Let the ranks of each machine use one copy of the arrays that they hold alike; all ranks must call it.

    Arrays count as alike if they have the same name and, compared byte by byte, the same content. Those that stay as
    they are: below :data:`LEAST`; trained; mapped from files or shared already; on a device or page-locked; not in a
    block that malloc got from the system for it alone, which it does for more than 32 MiB, and for less where it has
    not yet freed so much at once. Elsewhere than on Linux on x86-64 or 64-bit ARM, with glibc, all do.

    Nothing has a name in any folder, so nothing is left behind by processes that are killed. Where the system grants no
    file in memory, it is one in the folder of temporary files.

    Args:
        held: What this rank holds, by names that are the same on all ranks: tensors, NumPy arrays, PyG's ``Data``,
            dataclasses, and mappings and tuples of these.

    Returns:
        Bytes of this rank that are shared now.
    """
    machine = which_machine()
    mine, why = {}, ""
    if (writers := other_threads()) and machine is not None:
        machine, why = None, f"the threads {', '.join(writers)} of this process may write to them meanwhile"
    try:
        mine = find_blocks(held) if machine is not None else {}
    except Exception as error:  # the others wait for an answer, and no run need end for want of this
        why = str(error)
    everyone = _gather((machine, {name: block.array for name, block in mine.items()}, why))
    rank, holders = dist.get_rank(), _holders(everyone)
    offers: list[dict[str, _Offer]] = [{}] * len(everyone)
    outcomes: list[dict[str, bool | str]] = [{}] * len(everyone)
    beside = {name: holders[machine, name, block.array] for name, block in mine.items()}
    if any(len(ranks) > 1 for ranks in holders.values()):
        with ExitStack() as files:
            given = [name for name, ranks in beside.items() if len(ranks) > 1 and ranks[0] == rank]
            offers = _gather({name: _give(mine[name], files) for name in given})
            taken = [name for name, ranks in beside.items() if ranks[0] != rank]
            outcomes = _gather({name: _take(mine[name], offers[beside[name][0]][name]) for name in taken})
    _say(everyone, holders, offers, outcomes)
    shared = {name for name, ranks in beside.items() if any(outcomes[other].get(name) is True for other in ranks)}
    return sum(offers[beside[name][0]][name].size for name in shared if outcomes[rank].get(name, True) is True)


def other_threads() -> list[str]:
    """Return the names of Python threads that may write to an array while its pages are moved to a file.

    What is written to a page between the copy and the mapping of the file would be lost. Threads that keep to their own
    memory are left out.
    """
    here = threading.current_thread()
    found = []
    for thread in threading.enumerate():
        runs = type(thread) if type(thread) is not threading.Thread else getattr(thread, "_target", None)
        if thread is not here and not str(getattr(runs, "__module__", "")).startswith(_OWN_MEMORY):
            found.append(thread.name)
    return found


def find_blocks(held: Mapping[str, Any]) -> dict[str, Block]:
    """Return the pages, by name, of the arrays that can be shared; of several on one memory, only the first.

    Args:
        held: As :func:`share_equal_arrays` takes it.
    """
    regions = _own_regions()
    found: dict[str, Block] = {}
    seen: set[int] = set()
    for name, array in _arrays(held):
        start, size = _memory(array)
        if size < LEAST or (block := _block_around(start, size, regions)) is None or block in seen:
            continue
        seen.add(block)
        first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if not (isinstance(array, Tensor) and array.is_pinned()):
            found[name] = Block(first, end - first, (size, first - start), _owner(array))
    return found


def open_to_all(tensor: Tensor) -> Tensor | None:
    """Return the same content in the very memory that the ranks of the machine share, for a device to lock there.

    Pages of an array that ranks share are the machine's until somebody writes to them. A driver that locks pages for a
    device counts as one who may write, so locking the array itself would give each rank a copy of its own. What is
    returned is another view of the file in memory, which is everyone's: it must not be written to.

    Args:
        tensor: On the host, contiguous.

    Returns:
        None where its memory is not shared, or has been written to since.
    """
    begin, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    near = [first for first in _files if first < begin + size and begin < first + _files[first][0]]
    if not near:
        return None
    first = near[0]
    length, file, _ = _files[first]
    start = begin // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(begin + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    low, high = max(start, first), min(end, first + length)
    libc, access = _libc(), mmap.PROT_READ | mmap.PROT_WRITE
    # The file has whole pages alone; what of the array lies before and behind them is copied.
    place = libc.mmap(None, end - start, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if place == _FAILED:
        return None
    pages = (ctypes.c_char * (end - start)).from_address(place)
    finalize(pages, libc.munmap, place, end - start).atexit = False
    view: Any = np.frombuffer(pages, np.uint8)  # type: ignore[call-overload]
    if libc.mmap(place + low - start, high - low, access, mmap.MAP_SHARED | _FIXED, file, low - first) == _FAILED:
        return None
    own = tensor.detach().view(-1).view(torch.uint8).numpy()
    seen = view[begin - start : begin - start + size]
    for part in (slice(0, max(0, low - begin)), slice(max(0, high - begin), size)):
        seen[part] = own[part]
    if libc.memcmp(begin, seen.ctypes.data, size):
        return None
    return torch.from_numpy(seen).view(tensor.dtype).view(tensor.shape)


def _owner(array: Tensor | np.ndarray) -> Any:
    """Return what Python has of an array's memory, which dies with it."""
    if isinstance(array, Tensor):
        return array.untyped_storage()
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _keep_open(block: Block, file: int) -> None:
    """Note the file with which an array shares all of its pages, for as long as the array lives."""
    if block.owner is None:
        return
    life = next(_lives)
    _files[block.start] = block.size, os.dup(file), life
    finalize(block.owner, _close, block.start, life).atexit = False


def _close(start: int, life: int) -> None:
    if start in _files and _files[start][2] == life:
        os.close(_files.pop(start)[1])


def _arrays(held: Any, name: str = "") -> Iterator[tuple[str, Tensor | np.ndarray]]:
    if isinstance(held, BaseData):
        held = held.to_dict()
    elif dataclasses.is_dataclass(held) and not isinstance(held, type):
        held = vars(held)
    elif isinstance(held, tuple):  # no list, which may be a million of texts
        held = dict(enumerate(held))
    if isinstance(held, Mapping):
        for key, value in held.items():
            yield from _arrays(value, f"{name}.{key}" if name else str(key))
    elif isinstance(held, np.ndarray) and not held.dtype.hasobject:
        yield name, held
    elif type(held) in (Tensor, torch.nn.Parameter) and held.is_cpu:  # another class may keep its memory elsewhere
        if held.requires_grad:  # what is trained is written to at once
            return
        if held.layout == torch.strided:
            yield name, held
        elif held.layout == torch.sparse_coo:
            yield from _arrays({"indices": held._indices(), "values": held._values()}, name)
        elif held.layout == torch.sparse_csr:
            yield from _arrays({"crow": held.crow_indices(), "col": held.col_indices(), "values": held.values()}, name)


def _memory(array: Tensor | np.ndarray) -> tuple[int, int]:
    """Return the address and the bytes of all the memory that an array is a view of."""
    if isinstance(array, Tensor):
        storage = array.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.ctypes.data, array.nbytes if array.flags.c_contiguous or array.flags.f_contiguous else 0


def _own_regions() -> list[tuple[int, int]]:
    """Return the memory of this process that it neither maps from a file nor shares, ascending, as first and end."""
    regions: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split(maxsplit=5)
        if access != "rw-p" or (name and not name[0].startswith("[anon:")):
            continue
        first, end = (int(address, 16) for address in addresses.split("-"))
        if regions and regions[-1][1] == first:
            first = regions.pop()[0]
        regions.append((first, end))
    return regions


def _block_around(start: int, size: int, regions: list[tuple[int, int]]) -> int | None:
    """Return where the block begins that malloc got from the system for this memory alone, None if it is another.

    Such a block is given back to the system as a whole. Other memory may be used again, by an allocator that knows what
    it left there.
    """
    page = start // mmap.PAGESIZE * mmap.PAGESIZE
    around = next((region for region in regions if region[0] <= page and start + size <= region[1]), None)
    if around is None:
        return None
    # glibc begins a block with two words: 0, and its length with a flag. Who asks for aligned memory gets a later part
    # of it, with two such words before it: how far it lies behind the beginning, and the length of the rest.
    for words in (page, start - 2 * _WORD):
        if not page <= words <= start - 2 * _WORD:
            continue
        before, length = np.frombuffer(ctypes.string_at(words, 2 * _WORD), np.uint64).tolist()
        first, end = words - before, words + (length & ~_FLAGS)
        whole = first == page and end % mmap.PAGESIZE == 0 and start + size <= end <= around[1]
        if whole and length & _FLAGS == _IS_MAPPED:
            return int(first)
    return None


def which_machine() -> tuple[Any, ...] | None:
    """Return what tells apart machines, containers and users, who cannot open each other's files; None: no sharing."""
    try:
        if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
            return None
        if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            return None  # then any mapping can be refused, also one over memory that is there
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.readlink("/proc/self/ns/pid"), os.geteuid(), mmap.PAGESIZE
    except OSError:
        return None


def _gather(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _holders(everyone: list[Any]) -> dict[tuple[Any, ...], list[int]]:
    """Return which ranks hold an array of the same name and size on the same machine."""
    holders: dict[tuple[Any, ...], list[int]] = {}
    for rank, (machine, arrays, _) in enumerate(everyone):
        for name, array in arrays.items():
            holders.setdefault((machine, name, array), []).append(rank)
    return holders


def _give(block: Block, files: ExitStack) -> _Offer:
    """Move pages to a file, step by step, and offer it to the other ranks until ``files`` is closed."""
    done, why = 0, ""
    try:
        file = files.enter_context(_file_in_memory())
        state = os.fstat(file.fileno())
    except OSError as error:
        return _Offer(why=str(error))
    try:
        while done < block.size:
            step = (ctypes.c_char * min(_STEP, block.size - done)).from_address(block.start + done)
            written = os.pwrite(file.fileno(), step, done) // mmap.PAGESIZE * mmap.PAGESIZE
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _map_over(block.start + done, written, file, done)
            done += written
    except OSError as error:
        why = str(error)
    if done == block.size:
        _keep_open(block, file.fileno())
    return _Offer(os.getpid(), file.fileno(), (state.st_dev, state.st_ino), done, why)


def _take(block: Block, offer: _Offer) -> bool | str:
    """Map another rank's file over the same pages; returns False where they are not the same, or why it cannot be."""
    if not offer.size:
        return offer.why
    try:
        with open(f"/proc/{offer.process}/fd/{offer.number}", "r+b") as file:
            state = os.fstat(file.fileno())
            if (state.st_dev, state.st_ino) != offer.identity:
                return "its process is another one"
            theirs = np.memmap(file, np.uint8, "r", shape=(offer.size,))
            libc = _libc()
            if libc.memcmp(block.start, theirs.ctypes.data, offer.size):
                return False
            _map_over(block.start, offer.size, file, 0)
            libc.madvise(block.start, offer.size, _POPULATE_READ)  # the first batches need not fetch page by page
            if offer.size == block.size:
                _keep_open(block, file.fileno())
    except (OSError, ValueError) as error:
        return str(error)
    return True


def _file_in_memory() -> IO[bytes]:
    try:
        number = os.memfd_create("lightning_gnn")
    except OSError:  # not allowed here
        return tempfile.TemporaryFile()
    return os.fdopen(number, "w+b")


def _map_over(start: int, size: int, file: IO[bytes], offset: int) -> None:
    """Put pages of a file, which have the same content, in the place of pages of this process.

    Raises:
        OSError: That is not possible; the pages have the same content as before.
    """
    access, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _FIXED | _NO_RESERVE
    libc = _libc()
    if libc.mmap(start, size, access, private, file.fileno(), offset) != _FAILED:
        return
    why = ctypes.get_errno()
    # The system may have taken the pages away before it failed.
    if libc.mmap(start, size, access, private | mmap.MAP_ANONYMOUS, -1, 0) == _FAILED:
        raise MemoryError(f"the system has taken away {size} bytes of this process and cannot give them back")
    os.preadv(file.fileno(), [(ctypes.c_char * size).from_address(start)], offset)
    raise OSError(why, os.strerror(why))


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.memcmp.argtypes = [address, address, size]
    libc.madvise.argtypes = [address, size, ctypes.c_int]
    libc.munmap.argtypes = [address, size]
    return libc


def _say(
    everyone: list[Any],
    holders: dict[tuple[Any, ...], list[int]],
    offers: list[dict[str, _Offer]],
    outcomes: list[dict[str, bool | str]],
) -> None:
    """Say, in the first process, what became one copy, which ranks hold something else, and what failed."""
    saved = 0
    for (machine, name, array), ranks in holders.items():
        offer = offers[ranks[0]].get(name, _Offer())
        saved += offer.size * sum(outcomes[rank].get(name) is True for rank in ranks)
        others = [rank for rank in ranks if outcomes[rank].get(name) is False]
        for (where, called, theirs), them in holders.items():
            if (where, called) == (machine, name) and theirs[0] != array[0] and ranks[0] < them[0]:
                others += them
        if others:
            say_once(
                f"{name} of rank {', '.join(map(str, sorted(others)))} is not that of rank {ranks[0]}, so each has a "
                "copy of its own; make it from a fixed seed, or read it from one file, if all are to train on the same"
            )
        whys = {offer.why, *(why for rank in ranks if isinstance(why := outcomes[rank].get(name), str))} - {""}
        for why in sorted(whys):
            say_once(f"not all ranks of a machine use one copy of {name}: {why}")
    for rank, (_, _, why) in enumerate(everyone):
        if why:
            say_once(f"rank {rank} has a copy of graph and features of its own: {why}")
    if saved:
        rank_zero_info(f"The ranks of a machine use one copy of graph and features: {saved / 1e9:.2f} GB saved")

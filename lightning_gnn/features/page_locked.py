"""Host arrays that a GPU reads where they lie: their pages are locked in place, once, for all that look at them.

A pinned copy would stand beside the original, rounded up to a power of two by torch's allocator. Ranks of a machine
that share an array lock the one copy of it.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from contextlib import suppress
from typing import Any
from weakref import finalize

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from lightning_gnn.runtime.shared_arrays import shared_view

_COPIED = 1 << 20
"""Bytes below which a pinned copy is made: small arrays share their pages with others."""
_PORTABLE, _READ_ONLY = 1, 8
"""Flags of ``cudaHostRegister``: for all contexts of the process; and for pages that may not be written."""
_lock = threading.Lock()
_users: dict[int, int] = {}
"""Registered pieces, by address: how many arrays lie in them."""
_ends: dict[int, int] = {}
_left: deque[tuple[list[int], Tensor]] = deque()
"""What nobody looks at any more."""


def page_locked(tensor: Tensor) -> Tensor:
    """Return a tensor in page-locked memory: the same memory, if the system can lock it, else a copy.

    Its pages are unlocked when what is returned, and all views of it, are gone; until then the original stays too.
    Arrays that have pages in common, or are given twice, share them. What is written to the one is seen in the other,
    unless the ranks of the machine share the array (``shared_arrays.py``): then it stays as it was.
    """
    if not tensor.is_cpu:
        return tensor
    plain = tensor.layout == torch.strided and tensor.is_contiguous() and not tensor.requires_grad
    if not plain or _cudart() is None:
        return tensor.detach().pin_memory()
    size = tensor.numel() * tensor.element_size()
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(tensor.data_ptr() + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    with _lock:
        _unlock()
        shared = bool(_overlapping(first, end))
    # CUDA calls pinned what begins in a page that is locked here, perhaps for others and not to its end.
    if not shared and (size < _COPIED or tensor.is_pinned()):
        return tensor.pin_memory()
    if not shared and (everyones := shared_view(tensor)) is not None:
        tensor = everyones
        first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(tensor.data_ptr() + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    with _lock:
        _unlock()
        pieces, error = _register(first, end)
    if error:
        rank_zero_warn(f"{size / 1e9:.2f} GB of host memory cannot be page-locked in place ({error}): they are copied")
        return tensor.pin_memory()
    # A storage of its own over the same memory, which dies with the last tensor that looks at it. The original is held
    # until then, so that the memory is still there when it is unlocked.
    array = tensor.view(-1).view(torch.uint8).numpy()
    finalize(array, _release, pieces, tensor)
    return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)


def _register(first: int, end: int) -> tuple[list[int], str]:
    """Lock what is not locked yet of some pages; return the pieces in which they lie, or what the system said."""
    pieces, made = _overlapping(first, end), []
    at = first
    for start in pieces:
        if at < start:
            made.append((at, start))
        at = max(at, _ends[start])
    if at < end:
        made.append((at, end))
    done: list[int] = []
    for start, stop in made:
        if error := _call("cudaHostRegister", start, stop - start):
            for begun in done:
                _call("cudaHostUnregister", begun)
                del _users[begun], _ends[begun]
            return [], error
        _users[start], _ends[start] = 0, stop
        done.append(start)
    for start in (pieces := [*pieces, *done]):
        _users[start] += 1
    return pieces, ""


def _overlapping(first: int, end: int) -> list[int]:
    return sorted(start for start in _users if start < end and _ends[start] > first)


def _release(pieces: list[int], tensor: Tensor) -> None:
    """Let go of pieces, and of the memory they are in; may be called in the middle of anything, as collectors do."""
    _left.append((pieces, tensor))
    if _lock.acquire(blocking=False):
        try:
            _unlock()
        finally:
            _lock.release()


def _unlock() -> None:
    while _left:
        pieces, _ = _left.popleft()
        for start in pieces:
            _users[start] -= 1
            if not _users[start]:
                _call("cudaHostUnregister", start)
                del _users[start], _ends[start]


def _call(name: str, address: int, size: int | None = None) -> str:
    """Call the runtime; return nothing, or its message. Memory that may not be written is locked for reading."""
    cudart = _cudart()
    ways: list[tuple[int, ...]] = [(address,)]
    if size is not None:
        ways = [(address, size, _PORTABLE), (address, size, _PORTABLE | _READ_ONLY)]
    for arguments in ways:
        result = getattr(cudart, name)(*arguments)
        if int(result) == 0:
            return ""
        with suppress(RuntimeError):  # the runtime keeps the error for whoever launches next
            _forget_error()
    return str(cudart.cudaGetErrorString(result))


def _cudart() -> Any:
    """Return CUDA's runtime, None where there is another accelerator."""
    return torch.cuda.cudart() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    torch.zeros(1, device="cuda")

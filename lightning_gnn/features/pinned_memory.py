"""Host arrays that a GPU reads in place: their pages are locked where they are, once for all views of them.

A pinned copy would need the memory of the original again, rounded up to a power of two by torch's allocator. CUDA
refuses to copy to or from memory of which only a part is locked, so all pages of a storage are locked, or none.
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

_OWN_PAGES_BYTES = 32 << 20
"""Size from which an allocator maps pages for one array alone: glibc's largest ``M_MMAP_THRESHOLD``.

A smaller array shares its first and last page with other memory, so that a pinned copy of it is made.
"""
_PORTABLE, _READ_ONLY = 1, 8
"""Flags of ``cudaHostRegister``: for all contexts of the process; and for pages that may not be written."""
_lock = threading.Lock()
_users: dict[int, int] = {}
"""Number of tensors that read each locked range of pages, by its first address."""
_ends: dict[int, int] = {}
"""End of each locked range, by its first address."""
_released: deque[tuple[int, Tensor]] = deque()
"""Ranges that a tensor no longer reads, with the tensor that owns the memory."""


def pin_host_memory(tensor: Tensor) -> Tensor:
    """Return a tensor in page-locked memory: the same memory if it is large and can be locked, else a copy.

    The pages are unlocked when the result and its views are gone; until then the original stays in memory. Views of one
    storage share its pages. If the ranks of the machine share the array, the result keeps the content it had.
    """
    if not tensor.is_cpu:
        return tensor
    plain = tensor.layout == torch.strided and tensor.is_contiguous() and not tensor.requires_grad
    if not plain or _cudart() is None:
        return tensor.detach().pin_memory()
    size = tensor.numel() * tensor.element_size()
    with _lock:
        _unlock()
        first, end = _pages(tensor.data_ptr(), size)
        overlapping = [start for start in _users if start < end and _ends[start] > first]
        if overlapping:
            start = overlapping[0]
            error = "" if start <= first and end <= _ends[start] else "part of them is locked for another array"
        else:
            mapping = shared_view(tensor)
            if mapping is None and (tensor.untyped_storage().nbytes() < _OWN_PAGES_BYTES or tensor.is_pinned()):
                return tensor.pin_memory()
            tensor = tensor if mapping is None else mapping
            start, error = _register(tensor.untyped_storage())
        if not error:
            _users[start] += 1
    if error:
        rank_zero_warn(f"{size / 1e9:.2f} GB of host memory cannot be page-locked in place ({error}): they are copied")
        # CUDA takes for pinned what begins in a locked page, even if it does not end there.
        return (tensor.clone() if tensor.is_pinned() else tensor).pin_memory()
    # A storage of its own over the same memory, which is freed with the last view of it. The original is kept until
    # then, so that its memory is still mapped when it is unlocked.
    array = tensor.view(-1).view(torch.uint8).numpy()
    finalize(array, _release, start, tensor)
    return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)


def _pages(address: int, size: int) -> tuple[int, int]:
    """Return the first address of the pages of some memory, and the end of the last one."""
    return address // mmap.PAGESIZE * mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE) * mmap.PAGESIZE


def _register(storage: torch.UntypedStorage) -> tuple[int, str]:
    """Lock the pages of a storage; return their first address, and the message of an error."""
    start, end = _pages(storage.data_ptr(), storage.nbytes())
    if error := _call("cudaHostRegister", start, end - start):
        return start, error
    _users[start], _ends[start] = 0, end
    return start, ""


def _release(start: int, tensor: Tensor) -> None:
    """Release a range and the memory it is in; safe at any point of the program, as garbage collection needs it."""
    _released.append((start, tensor))
    if _lock.acquire(blocking=False):
        try:
            _unlock()
        finally:
            _lock.release()


def _unlock() -> None:
    """Unlock the ranges that no tensor reads any more."""
    while _released:
        start, _ = _released.popleft()
        _users[start] -= 1
        if not _users[start]:
            _call("cudaHostUnregister", start)
            del _users[start], _ends[start]


def _call(name: str, address: int, size: int | None = None) -> str:
    """Call the runtime; return the message of an error, else nothing. Memory that may not be written is read-only."""
    cudart = _cudart()
    ways: list[tuple[int, ...]] = [(address,)]
    if size is not None:
        ways = [(address, size, _PORTABLE), (address, size, _PORTABLE | _READ_ONLY)]
    for arguments in ways:
        result = getattr(cudart, name)(*arguments)
        if int(result) == 0:
            return ""
        with suppress(RuntimeError):  # the runtime keeps the error, and the next launch would raise it
            _forget_error()
    return str(cudart.cudaGetErrorString(result))


def _cudart() -> Any:
    """Return CUDA's runtime, None where there is another accelerator."""
    return torch.cuda.cudart() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    torch.zeros(1, device="cuda")

"""Pinning host arrays in place with ``cudaHostRegister``, with reference counts over all views of a storage.

A pinned copy would need as much memory again, rounded up to a power of two by torch's allocator. CUDA refuses copies to
or from partly locked memory, so either all pages of a storage are locked, or none.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from contextlib import suppress
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from lightning_gnn.runtime.lightning import rank_zero_warn
from lightning_gnn.runtime.shared_arrays import shared_view

# glibc's largest M_MMAP_THRESHOLD: smaller arrays may share their first and last page with others, so they are copied.
_OWN_PAGES_BYTES = 32 << 20
_PORTABLE, _READ_ONLY = 1, 8  # flags of cudaHostRegister: valid in all contexts of the process; read-only pages
_lock = threading.Lock()
_users: dict[int, int] = {}  # number of tensors that use each locked page range, by start address
_range_ends: dict[int, int] = {}  # end of each locked page range, by start address
_released: deque[tuple[int, Tensor]] = deque()  # page range and original of each tensor that was freed


def pin_host_memory(tensor: Tensor) -> Tensor:
    """Return a tensor in page-locked memory: in place if it is large and can be locked, else as a copy.

    The pages are unlocked when the last view of the result is freed; until then, the original stays in memory. Views of
    one storage share its locked pages. If the machine's ranks share the array, later writes to the original do not
    change the result.
    """
    if not tensor.is_cpu:
        return tensor
    plain = tensor.layout == torch.strided and tensor.is_contiguous() and not tensor.requires_grad
    if not plain or _cuda_runtime() is None:
        return tensor.detach().pin_memory()
    size = tensor.numel() * tensor.element_size()
    with _lock:
        _unlock_released()
        first, end = _page_bounds(tensor.data_ptr(), size)
        overlapping = [start for start in _users if start < end and _range_ends[start] > first]
        if overlapping:
            start = overlapping[0]
            error = "" if start <= first and end <= _range_ends[start] else "some pages are locked for another array"
        else:
            mapping = shared_view(tensor)
            if mapping is None and (tensor.untyped_storage().nbytes() < _OWN_PAGES_BYTES or tensor.is_pinned()):
                return tensor.pin_memory()
            tensor = tensor if mapping is None else mapping
            start, error = _lock_storage(tensor.untyped_storage())
        if not error:
            _users[start] += 1
    if error:
        rank_zero_warn(
            f"{size / 1e9:.2f} GB of host memory cannot be page-locked in place ({error}): making a pinned copy"
        )
        # CUDA reports a tensor as pinned if its first page is locked, even if its last page is not.
        return (tensor.clone() if tensor.is_pinned() else tensor).pin_memory()
    # Create a second storage over the same memory, whose finalizer runs with its last view. The finalizer holds the
    # original, so that its memory is still mapped when it is unlocked.
    array = tensor.view(-1).view(torch.uint8).numpy()
    finalize(array, _release, start, tensor)
    return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)


def _page_bounds(address: int, size: int) -> tuple[int, int]:
    """Return the start and end address of the pages that some memory covers."""
    return address // mmap.PAGESIZE * mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE) * mmap.PAGESIZE


def _lock_storage(storage: torch.UntypedStorage) -> tuple[int, str]:
    """Lock the pages of a storage; return their start address, and an error message or ``""``."""
    start, end = _page_bounds(storage.data_ptr(), storage.nbytes())
    if error := _call_cuda("cudaHostRegister", start, end - start):
        return start, error
    _users[start], _range_ends[start] = 0, end
    return start, ""


def _release(start: int, tensor: Tensor) -> None:
    """Release a tensor's page range. Never blocks, as it runs in garbage collection, possibly within the lock."""
    _released.append((start, tensor))
    if _lock.acquire(blocking=False):
        try:
            _unlock_released()
        finally:
            _lock.release()


def _unlock_released() -> None:
    """Unlock the page ranges whose last tensor was released; the caller must hold the lock."""
    while _released:
        start, _ = _released.popleft()
        _users[start] -= 1
        if not _users[start]:
            _call_cuda("cudaHostUnregister", start)
            del _users[start], _range_ends[start]


def _call_cuda(name: str, address: int, size: int | None = None) -> str:
    """Call a CUDA runtime function; with ``size``, retry as read-only. Return an error message or ``""``."""
    cudart = _cuda_runtime()
    attempts: list[tuple[int, ...]] = [(address,)]
    if size is not None:
        attempts = [(address, size, _PORTABLE), (address, size, _PORTABLE | _READ_ONLY)]
    for arguments in attempts:
        result = getattr(cudart, name)(*arguments)
        if int(result) == 0:
            return ""
        with suppress(RuntimeError):  # else the next kernel launch would raise the stored error
            _clear_cuda_error()
    return str(cudart.cudaGetErrorString(result))


def _cuda_runtime() -> Any:
    """Return the CUDA runtime, or None without CUDA."""
    return torch.cuda.cudart() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]


def _clear_cuda_error() -> None:
    torch.zeros(1, device="cuda")

"""Reading and writing ``.npy`` files: validated headers, memory mapping without memory commitment, atomic writes."""

import ctypes
import errno
import io
import math
import mmap
import os
import platform
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gnn.runtime.files import disk_full_error, whole_file
from lightning_gnn.runtime.memory_info import total_bytes
from lightning_gnn.runtime.urls import cached_path

Order = Literal["C", "F"]
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# Python defines MAP_NORESERVE only since version 3.13.
_HAS_LINUX_FLAGS = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if _HAS_LINUX_FLAGS else 0)

_BFLOAT16 = np.dtype("V2")  # NumPy lacks bfloat16; it reads a file with bfloat16, including JAX's, as this dtype
_randomly_read: set[int] = set()  # addresses of mapped tensors that are advised MADV_RANDOM


def check_file(path: Path) -> None:
    """Raise an error unless ``path`` is a file or a link to one; opening a FIFO would block forever."""
    if not path.exists():
        raise FileNotFoundError(f"{path} {'is a broken symbolic link' if path.is_symlink() else 'does not exist'}")
    if not path.is_file():
        raise ValueError(f"{path} must be a file, but is a folder, FIFO, socket or device; put the file there instead")


def load_array(path: str | Path, mmap: bool = True) -> Tensor:
    """Read one ``.npy`` file as a tensor; NumPy's two-byte void dtype ``V2`` is read as bfloat16.

    With ``mmap``, the file is mapped copy-on-write: pages are loaded on first access, and writes stay in memory. If the
    system commits memory for mapped files and refuses the size, the file is mapped read-only, with a warning.
    """
    path = cached_path(path)
    check_file(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        dtype, shape, order, count = _parse_header(file, size, path)
        start = file.tell()
        # NumPy requires aligned data. All current writers align it; other files are read instead of mapped.
        storage_dtype = np.dtype(np.int16) if dtype == _BFLOAT16 else dtype
        if mmap and count and start % storage_dtype.alignment == 0:
            array = np.ndarray(shape, storage_dtype, _map_file(file, size, path), start, order=order)
        else:
            array = _read_array(file, storage_dtype, count, path).reshape(shape, order=order)
    if dtype.kind == "b" and bool((array.view(np.uint8) > 1).any()):
        raise ValueError(f"{path} is damaged: it contains bool bytes other than 0 and 1; write it again")
    with warnings.catch_warnings():  # _map_file has already warned about a read-only array
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == _BFLOAT16 else tensor


def _read_array(file: IO[bytes], dtype: np.dtype, count: int, path: Path) -> np.ndarray:
    try:
        array = np.fromfile(file, dtype, count)
    except MemoryError:
        raise MemoryError(
            f"{path} is intact, but its {count * dtype.itemsize} bytes do not fit into memory; load it with mmap=True"
        ) from None
    if array.size < count:
        raise ValueError(f"{path} was truncated while it was read; write it again")
    return array


def _parse_header(file: IO[bytes], size: int, path: Path) -> tuple[np.dtype, tuple[int, ...], Order, int]:
    try:
        version = np.lib.format.read_magic(file)
        if version in _HEADERS:
            shape, is_fortran, dtype = _HEADERS[version](file)
        else:  # version 3.0, for fields with names beyond Latin-1
            array = np.load(path, mmap_mode="r")
            shape, is_fortran, dtype = array.shape, False, array.dtype
            file.seek(array.offset)
        if any(length < 0 for length in shape):
            raise ValueError(f"its header declares the shape {list(shape)}")
        count = math.prod(shape)
        expected = file.tell() + count * dtype.itemsize
        if expected != size and not dtype.hasobject:
            raise ValueError(f"its header declares {dtype} {list(shape)}, {expected} bytes in all, but it has {size}")
        if dtype != _BFLOAT16 and dtype.kind not in "biufc":
            raise _NoNumbersError(f"{path} holds {_describe_content(dtype)}, shape {list(shape)}, instead of numbers")
        if not dtype.isnative:
            raise ValueError(f"its {dtype} is not in native byte order: use array.astype('{dtype.str[1:]}')")
        if dtype != _BFLOAT16:
            torch.from_numpy(np.empty((0, *shape), dtype))  # raises TypeError if torch lacks the dtype
    except (OSError, _NoNumbersError):
        raise
    except Exception as error:  # NumPy parses the header as Python; a damaged one can raise anything
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path} is not a complete .npy file of numbers ({reason}); write it again") from error
    return dtype, shape, "F" if is_fortran else "C", count


class _NoNumbersError(ValueError):
    """A complete file holds values of a kind that a tensor cannot hold."""


def _describe_content(dtype: np.dtype) -> str:
    """Return a text for a dtype that is not numeric."""
    if dtype.names is None:
        kinds = {"U": "texts", "S": "byte strings", "O": "Python objects", "M": "dates", "m": "time differences"}
        return f"{kinds.get(dtype.kind, 'raw bytes')} ({dtype})"
    fields = ", ".join(f"{name} ({dtype[name]})" for name in dtype.names)
    return f"a structured array with the fields {fields}"


def _map_file(file: IO[bytes], size: int, path: Path) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    # Without MAP_NORESERVE, the kernel commits memory for all copy-on-write pages: 40 GB would not fit into 24 GB.
    options = (
        {"flags": mmap.MAP_PRIVATE | _NO_RESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE},
        {"flags": mmap.MAP_SHARED, "prot": mmap.PROT_READ},
    )
    for option in options:
        try:
            mapped = mmap.mmap(file.fileno(), size, **option)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise OSError(error.errno, f"{path} cannot be mapped: {error.strerror}") from None
            continue
        if option is not options[0]:
            warnings.warn(
                f"{path} is mapped read-only: a copy-on-write mapping of it exceeds the system's memory commit limit "
                "(vm.overcommit_memory=2 or ulimit -d). Writing to the tensor in place would kill the process",
                stacklevel=3,
            )
        return mapped
    raise OSError(
        errno.ENOMEM,
        f"{path} is intact, but the process lacks address space for its {size} bytes; raise the limit (ulimit -v, "
        "vm.max_map_count) or map fewer files",
    )


def save_arrays(folder: Path, arrays: Mapping[str, Tensor | np.ndarray | None]) -> None:
    """Write ``.npy`` files into a folder; each gets its final name only after all of them are written."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for name, array in arrays.items():
            if array is None:
                continue
            values = as_numpy(array.detach().cpu()) if isinstance(array, Tensor) else array
            size = len(_encode_header(values.dtype, values.shape)) + values.nbytes
            file = stack.enter_context(new_file(folder / f"{name}.npy", size))
            np.lib.format.write_array(file, values, allow_pickle=False)


def as_numpy(tensor: Tensor) -> np.ndarray:
    """Return a CPU tensor as a NumPy array without a copy; bfloat16 becomes ``V2``."""
    return tensor.view(torch.int16).numpy().view(_BFLOAT16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def create_array(path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> np.memmap:
    """Create one ``.npy`` file of zeros with its disk space reserved, and map it for writing."""
    header = _encode_header(np.dtype(dtype), shape)
    try:
        path.unlink(missing_ok=True)  # existing mappings of the old file remain valid
        with path.open("xb") as file:
            reserve(file, len(header) + math.prod(shape) * np.dtype(dtype).itemsize, path)
            file.write(header)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return np.lib.format.open_memmap(path, mode="r+")


def write_blocks(path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...], blocks: Iterable[np.ndarray]) -> None:
    """Write one ``.npy`` file in blocks of rows; it gets its final name once it is complete."""
    header, rows = _encode_header(np.dtype(dtype), shape), 0
    with new_file(path, len(header) + math.prod(shape) * np.dtype(dtype).itemsize) as file:
        file.write(header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).data)
            rows += len(block)
        if rows != shape[0]:
            raise ValueError(f"{path} must have {shape[0]} rows, but the blocks have {rows}")


@contextmanager
def new_file(path: Path, size: int) -> Iterator[IO[bytes]]:
    """Yield a temporary file for ``size`` bytes; on exit it is renamed to ``path``, or removed after an error."""
    try:
        with whole_file(path, size) as file:
            reserve(file, size, path)
            yield file
            file.truncate()  # drop space that was reserved but not written
    except OSError as error:
        if error.errno is None:  # NumPy sets no errno after a short write
            raise disk_full_error(path, error, size) from None
        raise


def reserve(file: IO[bytes], size: int, path: Path) -> None:
    """Reserve ``size`` bytes of disk space; a write to a mapped file on a full disk would kill the process."""
    check_room(path, size)
    try:
        try:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
        except (AttributeError, OSError) as error:  # AttributeError: macOS and Windows lack posix_fallocate
            if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            file.truncate(size)  # the file system cannot reserve space
    except OSError as error:
        raise disk_full_error(path, error, size) from None


def check_room(path: Path, size: int) -> None:
    """Raise an OSError unless the disk that will store ``path`` has ``size`` bytes left."""
    if shutil.disk_usage(path.parent).free < size:
        raise disk_full_error(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), size)


def _encode_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, fields)
    return file.getvalue()


def expect_scattered_reads(rows: Tensor) -> Tensor:
    """Advise the system that a mapped tensor is read at random, which disables read-ahead."""
    # A smaller tensor will be loaded completely anyway, which is faster with read-ahead.
    if rows.nbytes > total_bytes() // 2:
        advise(rows, "MADV_RANDOM")
        _randomly_read.add(rows.data_ptr())
    return rows


@contextmanager
def read_in_order(rows: Tensor) -> Iterator[None]:
    """Re-enable read-ahead for a tensor of :func:`expect_scattered_reads` while it is read sequentially."""
    is_advised = bool(_randomly_read) and rows.is_cpu and rows.data_ptr() in _randomly_read
    if is_advised:
        advise(rows, "MADV_NORMAL")
    try:
        yield
    finally:
        if is_advised:
            advise(rows, "MADV_RANDOM")


def advise(rows: Tensor, advice: str) -> None:
    """Call ``madvise`` for a tensor's pages with the constant ``advice`` of ``mmap``; do nothing if it is missing."""
    if not hasattr(mmap, advice):  # Windows
        return
    start = rows.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = rows.data_ptr() + rows.nbytes - start
    # The result is ignored: advice that the kernel rejects affects speed only.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(getattr(mmap, advice)))

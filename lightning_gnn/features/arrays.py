"""Arrays in ``.npy`` files: damaged ones are named, mapped ones claim no memory, and none is left half written."""

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

from lightning_gnn.runtime.files import whole_file
from lightning_gnn.runtime.memory_info import total_bytes

Order = Literal["C", "F"]
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# Python names the flag from version 3.13 on.
_USUAL = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if _USUAL else 0)
_FULL = (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # NumPy gives no number where a write falls short

_BFLOAT16 = np.dtype("V2")  # what NumPy calls bfloat16, for which it has no name, also where JAX writes it
_ADVICE = "make room, or write elsewhere"
_scattered: set[int] = set()  # where tensors begin that are read here and there


def check_file(path: Path) -> None:
    """Raise unless there is a file, or a link to one: opening a FIFO would wait for ever."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist{', but as a link to nothing' if path.is_symlink() else ''}")
    if not path.is_file():
        raise ValueError(f"{path} is a folder, FIFO, socket or device, but must be a file; put the file there instead")


def load_array(path: str | Path, mmap: bool = True) -> Tensor:
    """Read one ``.npy`` file as a tensor; numbers of two bytes that NumPy has no name for are bfloat16.

    By ``mmap`` it is mapped copy-on-write: pages come in as they are touched, and writes stay in memory. Where the
    system counts mapped files as memory and refuses so much, it is mapped read-only with a warning.
    """
    path = Path(path)
    check_file(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        dtype, shape, order, count = _described(file, size, path)
        start = file.tell()
        # Loops over an array need it aligned; every writer of today sees to it.
        held = np.dtype(np.int16) if dtype == _BFLOAT16 else dtype
        if mmap and count and start % held.alignment == 0:
            array = np.ndarray(shape, held, _mapped(file, size, path), start, order=order)
        else:
            array = _read(file, held, count, path).reshape(shape, order=order)
    if dtype.kind == "b" and bool((array.view(np.uint8) > 1).any()):
        raise ValueError(f"{path} is damaged: it holds bytes that are neither true nor false; write it again")
    with warnings.catch_warnings():  # torch warns of a read-only array, as we have done
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == _BFLOAT16 else tensor


def _read(file: IO[bytes], dtype: np.dtype, count: int, path: Path) -> np.ndarray:
    try:
        array = np.fromfile(file, dtype, count)
    except MemoryError:
        raise MemoryError(
            f"{path} is whole, but memory does not suffice for its {count * dtype.itemsize} bytes; load it with "
            "mmap=True"
        ) from None
    if array.size < count:
        raise ValueError(f"{path} was cut off while it was read; write it again")
    return array


def _described(file: IO[bytes], size: int, path: Path) -> tuple[np.dtype, tuple[int, ...], Order, int]:
    try:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"version {version[0]}.{version[1]} of the format is for arrays of records")
        shape, is_fortran, dtype = _HEADERS[version](file)
        if any(length < 0 for length in shape):
            raise ValueError(f"its header tells of the shape {list(shape)}")
        count = math.prod(shape)
        whole = file.tell() + count * dtype.itemsize
        if whole != size and not dtype.hasobject:
            raise ValueError(f"its header tells of {dtype} {list(shape)} and so of {whole} bytes, but it has {size}")
        if not dtype.isnative:
            raise ValueError(f"its {dtype} are in the byte order of other machines: array.astype('{dtype.str[1:]}')")
        if dtype != _BFLOAT16:
            torch.from_numpy(np.empty((0, *shape), dtype))  # whether a tensor can hold it
    except OSError:
        raise
    except Exception as error:  # the text of a damaged header is parsed as Python, which can raise anything
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path} is not a complete .npy file of numbers ({reason}); write it again") from error
    return dtype, shape, "F" if is_fortran else "C", count


def _mapped(file: IO[bytes], size: int, path: Path) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    # The kernel counts pages that might be copied as memory unless asked not to: 40 GB would not fit into 24.
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
                f"{path} is mapped read-only, as the system counts other mappings as memory (vm.overcommit_memory=2 or "
                "ulimit -d) and this one is too large: writing to the tensor in place would end the process",
                stacklevel=3,
            )
        return mapped
    raise OSError(
        errno.ENOMEM,
        f"{path} is whole, but the system has no address space for its {size} bytes; raise the limit of this process "
        "(ulimit -v, vm.max_map_count) or map fewer files",
    )


def save_arrays(folder: Path, arrays: Mapping[str, Tensor | np.ndarray | None]) -> None:
    """Write ``.npy`` files into a folder; until all of them are on the disk, none is seen under its name."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for name, array in arrays.items():
            if array is None:
                continue
            values = as_numpy(array.detach().cpu()) if isinstance(array, Tensor) else array
            size = len(_header(values.dtype, values.shape)) + values.nbytes
            file = stack.enter_context(new_file(folder / f"{name}.npy", size))
            np.lib.format.write_array(file, values, allow_pickle=False)


def as_numpy(tensor: Tensor) -> np.ndarray:
    """Return a tensor on the CPU as NumPy has it, bfloat16 as ``V2``."""
    return tensor.view(torch.int16).numpy().view(_BFLOAT16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def create_array(path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> np.memmap:
    """Make one ``.npy`` file of zeros with all its room on the disk reserved, mapped for writing."""
    header = _header(np.dtype(dtype), shape)
    try:
        path.unlink(missing_ok=True)  # mappings of the old file keep what is in it
        with path.open("xb") as file:
            reserve(file, len(header) + math.prod(shape) * np.dtype(dtype).itemsize, path)
            file.write(header)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return np.lib.format.open_memmap(path, mode="r+")


def write_blocks(path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...], blocks: Iterable[np.ndarray]) -> None:
    """Write one ``.npy`` file, block after block of its rows; it gets its name once it is whole."""
    header, rows = _header(np.dtype(dtype), shape), 0
    with new_file(path, len(header) + math.prod(shape) * np.dtype(dtype).itemsize) as file:
        file.write(header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).data)
            rows += len(block)
        if rows != shape[0]:
            raise ValueError(f"{path} was to have {shape[0]} rows, but {rows} came")


@contextmanager
def new_file(path: Path, size: int) -> Iterator[IO[bytes]]:
    """Yield a file beside ``path`` to write ``size`` bytes to; on the way out it gets the name, or is removed."""
    try:
        with whole_file(path) as file:
            reserve(file, size, path)
            yield file
            file.truncate()  # what was reserved and not written
    except OSError as error:
        if error.errno in _FULL and not str(error).endswith(_ADVICE):
            raise _no_room(path, size, error) from None
        raise


def reserve(file: IO[bytes], size: int, path: Path) -> None:
    """Take the room for ``size`` bytes on the disk now: a mapped file that outgrows it later kills the process."""
    check_room(path, size)
    try:
        try:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
        except (AttributeError, OSError) as error:  # AttributeError: not on macOS and Windows
            if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            file.truncate(size)  # a file system that reserves nothing
    except OSError as error:
        raise _no_room(path, size, error) from None


def check_room(path: Path, size: int) -> None:
    """Raise an OSError unless the disk on which ``path`` is to lie has ``size`` bytes left."""
    if shutil.disk_usage(path.parent).free < size:
        raise _no_room(path, size, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def _no_room(path: Path, size: int, error: OSError) -> OSError:
    reason = (error.strerror or str(error)).rstrip(".")
    free = shutil.disk_usage(path.parent).free
    return OSError(
        error.errno or errno.ENOSPC,
        f"{path} needs {size} bytes and cannot be written ({reason}): its disk has {free} bytes left; {_ADVICE}",
    )


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()


def expect_scattered_reads(rows: Tensor) -> Tensor:
    """Tell the system that rows of a mapped tensor will be read here and there; it then reads little around each."""
    # Smaller ones come in whole sooner or later, and sooner in large pieces.
    if rows.nbytes > total_bytes() // 2:
        advise(rows, "MADV_RANDOM")
        _scattered.add(rows.data_ptr())
    return rows


@contextmanager
def read_in_order(rows: Tensor) -> Iterator[None]:
    """Let the system read ahead again in a tensor of :func:`expect_scattered_reads` while all of it is read."""
    scattered = bool(_scattered) and rows.is_cpu and rows.data_ptr() in _scattered
    if scattered:
        advise(rows, "MADV_NORMAL")
    try:
        yield
    finally:
        if scattered:
            advise(rows, "MADV_RANDOM")


def advise(rows: Tensor, advice: str) -> None:
    """Tell the system how a tensor will be read, by the name of the advice in ``mmap``; others know none."""
    if not hasattr(mmap, advice):  # Windows
        return
    start = rows.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = rows.data_ptr() + rows.nbytes - start
    # Advice that is not taken costs time alone.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(getattr(mmap, advice)))

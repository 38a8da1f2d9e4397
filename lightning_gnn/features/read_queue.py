"""Many file reads in flight from one thread, with Linux's native asynchronous I/O (``io_submit``)."""

import ctypes
import platform
import sys
import weakref
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types

DEPTH = 256  # maximum reads in flight per queue
_SYSCALL_NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}  # io_setup, _destroy, _submit, _getevents
_READ_BYTES, _EVENT_BYTES = 64, 32  # sizes of the kernel's struct iocb and struct io_event
QUEUE_BYTES = DEPTH * (_READ_BYTES + 8) + 24  # bytes of a queue's arrays
_MAX_FAILED_WAITS = 10_000  # consecutive failures of io_getevents, which signals can cause, before giving up
_njit = numba.njit(nogil=True, cache=True)
_word, _address = types.int64, types.uintp
_syscall: Any = types.ExternalFunction("syscall", _word(_word, _word, _word, _address, _address, _address))


class ReadQueue:
    """Arrays and kernel handle of a read queue for :func:`submit` and :func:`wait`. Not thread-safe."""

    def __init__(self) -> None:
        calls = _SYSCALL_NUMBERS.get(platform.machine())
        if not sys.platform.startswith("linux") or sys.byteorder != "little" or calls is None:
            raise OSError("asynchronous reads are not supported on this system")
        setup, destroy, submit_call, wait_call = calls
        system = ctypes.CDLL(None, use_errno=True).syscall
        context = ctypes.c_ulong(0)
        if system(ctypes.c_long(setup), ctypes.c_uint(DEPTH), ctypes.byref(context)):
            raise OSError(ctypes.get_errno(), "io_setup failed")
        self.state = np.array([context.value, submit_call, wait_call], np.uint64).view(np.int64)
        """The kernel's handle of the queue and the numbers of two system calls, int64 ``[3]``."""
        self.reads = np.zeros((DEPTH, _READ_BYTES // 8), np.int64)  # one struct iocb per row, int64 [DEPTH, 8]
        self.got = np.zeros(DEPTH, np.int64)  # bytes returned by each read, negative for an error, int64 [DEPTH]
        self.close = weakref.finalize(self, system, ctypes.c_long(destroy), context)  # destroys the queue; idempotent


@_njit
def set_read(
    reads: npt.NDArray[np.int64], number: int, descriptor: int, address: int, num_bytes: int, position: int
) -> None:
    """Fill in the ``iocb`` of one read; :func:`submit` starts it."""
    reads[number] = 0
    reads[number, 0] = number
    reads[number, 2] = np.int64(descriptor) << 32
    reads[number, 3] = address
    reads[number, 4] = num_bytes
    reads[number, 5] = position


@_njit
def submit(
    state: npt.NDArray[np.int64], reads: npt.NDArray[np.int64], got: npt.NDArray[np.int64], first: int, count: int
) -> int:
    """Start ``count`` consecutive reads and return how many were accepted; the others are marked as failed."""
    pointers = np.empty(count, np.int64)
    for number in range(count):
        pointers[number] = reads.ctypes.data + (first + number) * _READ_BYTES
        got[first + number] = -1
    submitted = 0
    while submitted < count:
        address = pointers.ctypes.data + np.uintp(8 * submitted)
        accepted = _syscall(state[1], state[0], count - submitted, address, np.uintp(0), np.uintp(0))
        if accepted <= 0:
            break
        submitted += accepted
    return submitted


@_njit
def wait(
    state: npt.NDArray[np.int64], got: npt.NDArray[np.int64], pending: npt.NDArray[np.int64], part: int, size: int
) -> bool:
    """Wait for all reads of a part, ``pending`` int64 ``[parts]``; return False if the queue is broken."""
    events = np.empty((DEPTH, _EVENT_BYTES // 8), np.int64)
    failures = 0
    while pending[part]:
        least = pending[part]
        ended = _syscall(state[2], state[0], least, np.uintp(DEPTH), events.ctypes.data, np.uintp(0))
        if ended < 0:
            failures += 1
            if failures == _MAX_FAILED_WAITS:
                return False
            continue
        failures = 0
        for number in range(ended):
            read = events[number, 0]
            got[read] = events[number, 2]
            pending[read // size] -= 1
    return True

"""Many reads of a file under way at once from one thread: Linux's asynchronous I/O."""

import ctypes
import platform
import sys
import weakref
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types

DEPTH = 256  # reads of a queue under way at once
_NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}  # of io_setup, _destroy, _submit and _getevents
_READ_BYTES, _EVENT_BYTES = 64, 32  # sizes of the kernel's struct iocb and struct io_event
QUEUE_BYTES = DEPTH * (_READ_BYTES + 8) + 24  # bytes of a queue's arrays
_INTERRUPTED = 10_000  # so often in a row waiting may be cut short by signals
_njit = numba.njit(nogil=True, cache=True)
_word, _address = types.int64, types.uintp
_syscall: Any = types.ExternalFunction("syscall", _word(_word, _word, _word, _address, _address, _address))


class ReadQueue:
    """Reads that wait for the disk together, for one thread at a time; :func:`submit` and :func:`wait` use it."""

    def __init__(self) -> None:
        calls = _NUMBERS.get(platform.machine())
        if not sys.platform.startswith("linux") or sys.byteorder != "little" or calls is None:
            raise OSError("reads cannot be queued on this system")
        setup, destroy, submit_call, wait_call = calls
        system = ctypes.CDLL(None, use_errno=True).syscall
        context = ctypes.c_ulong(0)
        if system(ctypes.c_long(setup), ctypes.c_uint(DEPTH), ctypes.byref(context)):
            raise OSError(ctypes.get_errno(), "reads cannot be queued")
        self.state = np.array([context.value, submit_call, wait_call], np.uint64).view(np.int64)
        """The kernel's handle of the queue and the numbers of two system calls, int64 ``[3]``."""
        self.reads = np.zeros((DEPTH, _READ_BYTES // 8), np.int64)
        """What the kernel is asked for, a read a row, int64 ``[DEPTH, 8]``."""
        self.got = np.zeros(DEPTH, np.int64)  # bytes that came of each, or below 0 for an error, int64 [DEPTH]
        self.close = weakref.finalize(self, system, ctypes.c_long(destroy), context)
        """Give the queue back; as often as you like."""


@_njit
def ask(
    reads: npt.NDArray[np.int64], number: int, descriptor: int, address: int, num_bytes: int, position: int
) -> None:
    """Write down one read; :func:`submit` begins it."""
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
    """Begin reads that were written down one after the other; those that the kernel refuses have failed at once."""
    pointers = np.empty(count, np.int64)
    for number in range(count):
        pointers[number] = reads.ctypes.data + (first + number) * _READ_BYTES
        got[first + number] = -1
    done = 0
    while done < count:
        at = pointers.ctypes.data + np.uintp(8 * done)
        begun = _syscall(state[1], state[0], count - done, at, np.uintp(0), np.uintp(0))
        if begun <= 0:
            break
        done += begun
    return done


@_njit
def wait(
    state: npt.NDArray[np.int64], got: npt.NDArray[np.int64], pending: npt.NDArray[np.int64], part: int, size: int
) -> bool:
    """Wait until all reads of a part have ended, ``pending`` int64 ``[parts]``; False: the kernel lost the queue."""
    events = np.empty((DEPTH, _EVENT_BYTES // 8), np.int64)
    cut_short = 0
    while pending[part]:
        least = pending[part]
        ended = _syscall(state[2], state[0], least, np.uintp(DEPTH), events.ctypes.data, np.uintp(0))
        if ended < 0:
            cut_short += 1
            if cut_short == _INTERRUPTED:
                return False
            continue
        cut_short = 0
        for number in range(ended):
            read = events[number, 0]
            got[read] = events[number, 2]
            pending[read // size] -= 1
    return True

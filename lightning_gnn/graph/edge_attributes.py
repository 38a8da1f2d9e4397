"""Edge attributes for sampling: times, which sort the adjacency lists, weights, and counts of parallel edges."""

import math
from numbers import Real
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Array = npt.NDArray[Any]


def as_times(time: object, name: str) -> Tensor:
    """Convert a user's times to a tensor."""
    if isinstance(time, Tensor):
        return time
    array = np.asarray(time)
    if array.dtype.kind not in "biuf":
        fix = "torch.from_numpy(np.asarray(times, 'datetime64[s]').astype('int64')) gives dates in seconds"
        raise TypeError(f"{name} must be numbers in a single unit, but are {array.dtype}: {fix}")
    return torch.as_tensor(array)


def ordered_times(time: object, name: str, floating: bool) -> Tensor:
    """Convert times ``[n]`` to int64, preserving their order; floating-point bits become ordered integers."""
    if not isinstance(time, Tensor) or time.dtype == torch.bool or time.is_complex():
        kind = as_times(time, name).dtype if isinstance(time, Tensor | np.ndarray) else type(time).__name__
        raise TypeError(f"{name} must be an integer or floating-point tensor, but are {kind}")
    if time.dim() != 1:
        raise ValueError(f"{name} must have one dimension, but have the shape {list(time.shape)}")
    time = time.detach().cpu()
    if not time.is_floating_point():
        exact = time.to(torch.int64).contiguous()
        if time.dtype == torch.uint64 and bool((exact < 0).any()):
            raise ValueError(f"{name} are too large for int64")
        if floating and bool(((exact > 2**53) | (exact < -(2**53))).any()):
            raise ValueError(f"{name} are integers that float64 cannot represent exactly: use integers for all times")
        return _order_floats(exact.to(torch.float64)) if floating else exact
    if bool(time.isnan().any()):
        raise ValueError(f"{name} hold NaN, at {int(time.isnan().nonzero()[0])}: every entry needs a time")
    return _order_floats(time.to(torch.float64))


def _order_floats(time: Tensor) -> Tensor:
    """Map float64 to int64 with the same order."""
    bits = (time + 0.0).view(torch.int64)  # + 0.0 converts -0.0 to 0.0
    return torch.where(bits < 0, bits ^ (2**63 - 1), bits)


def time_limits(time: Tensor, window: float | None, floating: bool) -> tuple[Tensor, Tensor | None]:
    """Return the latest eligible edge time of each seed and the window's exclusive start, as :func:`ordered_times`."""
    check_window(window)
    if window is not None and window == math.inf:
        window = None
    checked = ordered_times(time, "times of seeds", floating)
    time = time.detach().cpu()
    if floating:
        return checked, None if window is None else _order_floats(time.to(torch.float64) - window)
    if time.is_floating_point():  # seeds have floats, edges integers: n <= t is equivalent to n <= floor(t)
        after = None if window is None else _floor_to_int64(time.to(torch.float64) - window)
        return _floor_to_int64(time.to(torch.float64)), after
    if window is None:
        return checked, None
    lowest, step = -(2**63), min(math.ceil(min(window, 2.0**62)), 2**62)
    return checked, torch.where(checked < lowest + step, lowest, checked - step)


def check_window(window: object) -> None:
    """Raise a ValueError unless this is a number above 0, or None."""
    is_number = isinstance(window, Real) and not isinstance(window, bool | np.timedelta64)
    if window is not None and not (is_number and float(window) > 0):  # type: ignore[arg-type]
        raise ValueError(f"time_window must be a number above 0, in the unit of the times, but is {window!r}")


def _floor_to_int64(time: Tensor) -> Tensor:
    """Round down to int64, clamped to its range."""
    clamped = time.floor().clamp(-(2.0**63), 2.0**63 - 1024).to(torch.int64)
    return torch.where(time >= 2.0**63, 2**63 - 1, clamped)


def valid_weights(weight: object) -> Tensor:
    """Validate weights and return them as float64."""
    if not isinstance(weight, Tensor) or weight.dtype == torch.bool or weight.is_complex():
        kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"weights of edges must be a floating-point or integer tensor, but are {kind}")
    if weight.dim() != 1:
        raise ValueError(f"weights of edges must have one dimension, but have the shape {list(weight.shape)}")
    out = weight.detach().cpu().to(torch.float64).contiguous()
    invalid = ~((out >= 0) & (out < torch.inf))
    if bool(invalid.any()):
        at = int(invalid.nonzero()[0])
        raise ValueError(f"weights of edges must be at least 0 and finite, but that of edge {at} is {float(out[at])}")
    return out


@numba.njit(nogil=True, cache=True)
def order_by_time(indptr: _Array, time: _Array) -> _Array:
    """Return the permutation that sorts each list by time (stable), int64 ``[E]``; empty if all are sorted."""
    order = np.empty(0, np.int64)
    for v in range(indptr.size - 1):
        begin, end = indptr[v], indptr[v + 1]
        for e in range(begin + 1, end):
            if time[e] < time[e - 1]:
                if not order.size:
                    order = np.arange(time.size)
                order[begin:end] = begin + np.argsort(time[begin:end], kind="mergesort")
                break
    return order


@numba.njit(nogil=True, cache=True)
def _sum_lists(indptr: _Array, weight: _Array) -> _Array:
    prefix = np.empty(weight.size, np.float64)
    for v in range(indptr.size - 1):
        total = 0.0
        for e in range(indptr[v], indptr[v + 1]):
            total += weight[e]
            prefix[e] = total
    return prefix


def sum_weights(indptr: _Array, weight: _Array) -> _Array:
    """Return the inclusive prefix sums of each list's weights, added in order, float64 ``[E]``."""
    prefix = _sum_lists(indptr, weight)
    if not np.isfinite(prefix).all():
        raise ValueError("the weights of the edges into one node add up to infinity: use smaller weights")
    return prefix


@numba.njit(nogil=True, cache=True)
def count_parallel(indptr: _Array, indices: _Array, num_sources: int) -> _Array:
    """Count each edge's earlier edges in the list with the same source, int32 ``[E]``."""
    counts = np.zeros(indices.size, np.int32)
    last, seen = np.full(num_sources, -1), np.zeros(num_sources, np.int32)
    for v in range(indptr.size - 1):
        for e in range(indptr[v], indptr[v + 1]):
            u = indices[e]
            seen[u] = seen[u] + 1 if last[u] == v else 0
            last[u], counts[e] = v, seen[u]
    return counts

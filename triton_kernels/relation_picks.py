"""Device functions that restrict in-edges by time, and pick them by weight or by the variates of their sources."""

import triton
import triton.language as tl

from lightning_gnn.triton_kernels.hashing import GOLDEN, Array, Lanes, Scalar, mix, node_key


@triton.jit
def count_at_most(values: Array, begin: Lanes, count: Lanes, limit: Lanes) -> Lanes:
    """Count the values not above a limit, of ``count`` ascending values per row: int32 ``[R]``, one row per thread."""
    found = count * 0
    left = count
    while tl.max(left, 0) > 0:
        half = left >> 1
        below = tl.load(values + begin + found + half, mask=left > 0, other=0) <= limit
        below = below & (left > 0)
        found = tl.where(below, found + half + 1, found)
        left = tl.where(below, left - half - 1, half)
    return found


@triton.jit
def draw_fraction(stream: Lanes, j: Lanes) -> Lanes:
    """Draw the j-th float64 in ``[0, 1)`` of each stream, from the upper 53 bits of its hash."""
    return (mix(stream + (j + 1).to(tl.uint64) * GOLDEN) >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def hit(prefix: Array, begin: Lanes, degree: Lanes, stream: Lanes, j: Lanes, total: Lanes, on: Lanes) -> Lanes:
    """Return the edge of its list that the j-th draw of a row selects by weight, int32 ``[R]``."""
    place = draw_fraction(stream, j) * total
    # Search all edges but the last: it is the default, also if rounding puts the draw past the end.
    return count_at_most(prefix, begin, tl.where(on, degree - 1, 0), place)


@triton.jit
def next_picked(
    eid: Array, at: Lanes, begin: Lanes, degree: Lanes, count: Lanes, position: Lanes, on: Lanes
) -> Lanes:  # fmt: skip
    """Return the first picked edge of a row at or after a position, or the row's degree: int32 ``[R]``."""
    out = degree
    most = tl.max(tl.where(on, count, 0), 0)
    i = 0
    while i < most:
        own = on & (i < count)
        picked = (tl.load(eid + at + i, mask=own, other=0) - begin).to(tl.int32)
        out = tl.where(own & (picked >= position), tl.minimum(out, picked), out)
        i += 1
    return out


@triton.jit
def pick_left(
    weight: Array, eid: Array, begin: Lanes, degree: Lanes, at: Lanes, stream: Lanes, number: Scalar, count: Lanes,
    on: Lanes,
) -> Lanes:  # fmt: skip
    """Pick one remaining edge of each row by weight, with a linear scan: offsets int32 ``[R]``."""
    longest = tl.max(tl.where(on, degree, 0), 0)
    fraction = draw_fraction(stream, degree * 0 + number)
    passed = fraction * 0.0 + float("inf")
    out = degree * 0
    # The first pass totals the weights of the remaining edges; the second finds where the running sum passes the draw.
    for second in range(2):
        place = tl.where(second > 0, fraction * passed, passed)
        passed = fraction * 0.0
        found = on & (degree < 0)
        skipped = next_picked(eid, at, begin, degree, count, degree * 0, on)
        position = 0
        while position < longest:
            inside = on & (position < degree)
            met = inside & (skipped == position)
            left = inside & (skipped != position) & (found == 0)
            passed += tl.load(weight + begin + position, mask=left, other=0.0)
            out = tl.where(left, position, out)
            found = found | (left & (passed > place))
            position += 1
            if tl.sum(met.to(tl.int32), 0) > 0:
                skipped = next_picked(eid, at, begin, degree, count, degree * 0 + position, on)
    return out


@triton.jit
def pick_by_weight(
    weight: Array, prefix: Array, eid: Array, begin: Lanes, degree: Lanes, at: Lanes, stream: Lanes, fanout: Scalar,
    replace: Scalar, on: Lanes,
) -> None:  # fmt: skip
    """Write a row's picks: each is drawn in proportion to the weights of the remaining edges."""
    # First by rejection: draw among all edges, and draw again if the edge has been picked already.
    total = tl.load(prefix + begin + degree - 1, mask=on, other=0.0)
    count = degree * 0
    most = 8 * fanout.to(tl.int64) + 32
    number = 0
    missing = on & (fanout > 0)
    while (number < most) & (tl.sum(missing.to(tl.int32), 0) > 0):
        found = hit(prefix, begin, degree, stream, degree * 0 + number, total, missing)
        e = begin + found
        again = missing & (degree < 0)
        i = 0
        earlier = tl.where(replace != 0, 0, tl.max(tl.where(missing, count, 0), 0))
        while i < earlier:
            own = missing & (i < count)
            again = again | (own & (tl.load(eid + at + i, mask=own, other=-1) == e))
            i += 1
        new = missing & (again == 0)
        tl.store(eid + at + count, e, mask=new)
        tl.debug_barrier()  # Triton assigns threads to accesses: one may read data that another thread wrote
        count += new.to(tl.int32)
        missing = missing & (count < fanout)
        number += 1
    while tl.sum(missing.to(tl.int32), 0) > 0:  # then by linear scans, as the remaining weights are negligible
        e = begin + pick_left(weight, eid, begin, degree, at, stream, number, count, missing)
        tl.store(eid + at + count, e, mask=missing)
        tl.debug_barrier()
        count += missing.to(tl.int32)
        missing = missing & (count < fanout)
        number += 1


@triton.jit
def variate(key: Scalar, source: Lanes, earlier: Lanes, often: Scalar, batch: Scalar) -> Lanes:
    """Return the variates of edges' sources, uint64 ``[T]``, renewed once per ``often`` mini-batches."""
    out = node_key(key, source)
    if often > 1:
        step = often.to(tl.uint64)
        period = (batch.to(tl.uint64) + node_key(key * 0, source) % step) // step
        out = mix(out + (period + 1) * GOLDEN)
    return tl.where(earlier > 0, mix(out + earlier.to(tl.uint64) * GOLDEN), out)


@triton.jit
def variates(
    indices: Array, stride: Scalar, parallel: Array, has_parallel: Scalar, begin: Scalar, j: Lanes, on: Lanes,
    key: Scalar, often: Scalar, batch: Scalar,
) -> Lanes:  # fmt: skip
    """Return the variates of edges j ``[T]`` of one row; arguments as in :func:`pick_by_variate`."""
    source = tl.load(indices + (begin + j) * stride, mask=on, other=0)
    earlier = tl.load(parallel + begin + j, mask=on & (has_parallel != 0), other=0)
    return variate(key, source, earlier, often, batch)


@triton.jit
def count_below(
    indices: Array, stride: Scalar, parallel: Array, has_parallel: Scalar, begin: Scalar, degree: Scalar, key: Scalar,
    often: Scalar, batch: Scalar, bound: Scalar, STRICTLY: tl.constexpr, T: tl.constexpr,
) -> Scalar:  # fmt: skip
    """Count the edges of one row with a variate below a bound (STRICTLY) or at most the bound."""
    total = tl.zeros([T], tl.int32)
    first = 0
    while first < degree:
        j = first + tl.arange(0, T)
        on = j < degree
        own = variates(indices, stride, parallel, has_parallel, begin, j, on, key, often, batch)
        below = own < bound if STRICTLY else own <= bound
        total += (on & below).to(tl.int32)
        first += T
    return tl.sum(total, 0)


@triton.jit
def pick_by_variate(
    indices: Array, stride: Scalar, parallel: Array, has_parallel: Scalar, eid: Array, begin: Scalar, degree: Scalar,
    at: Scalar, fanout: Scalar, key: Scalar, often: Scalar, batch: Scalar, T: tl.constexpr,
) -> None:  # fmt: skip
    """Write the edges of a row with the smallest variates in CSC order, earlier edges first at ties; one program."""
    # Bisect the variates. Invariant: fewer than `fanout` are below `low`; `number` >= `fanout` are at most `high`.
    low = key.to(tl.uint64) * 0
    high = low - 1
    number = degree
    few = 2 * fanout.to(tl.int64) + 8
    guess = high >> 1
    if few < degree:
        guess = (high // degree.to(tl.uint64)) * few.to(tl.uint64)
    while (low < high) & (number != fanout):
        count = count_below(
            indices, stride, parallel, has_parallel, begin, degree, key, often, batch, guess, False, T
        )  # fmt: skip
        enough = count >= fanout
        number = tl.where(enough, count, number)
        high = tl.where(enough, guess, high)
        low = tl.where(enough, low, guess + 1)
        guess = low + ((high - low) >> 1)
    equal_ones = degree  # number of variates equal to the bound that are taken: all, unless there are too many
    if number != fanout:
        equal_ones = fanout - count_below(
            indices, stride, parallel, has_parallel, begin, degree, key, often, batch, high, True, T
        )  # fmt: skip
    written = degree * 0
    equal = degree * 0
    first = 0
    while first < degree:
        j = first + tl.arange(0, T)
        on = j < degree
        own = variates(indices, stride, parallel, has_parallel, begin, j, on, key, often, batch)
        same = (on & (own == high)).to(tl.int32)
        rank = equal + tl.cumsum(same, 0)
        taken = on & ((own < high) | ((own == high) & (rank <= equal_ones)))
        places = taken.to(tl.int32)
        tl.store(eid + at + written + tl.cumsum(places, 0) - 1, begin + j, mask=taken)
        written += tl.sum(places, 0)
        equal += tl.sum(same, 0)
        first += T

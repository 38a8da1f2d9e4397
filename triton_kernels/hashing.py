"""The random stream of ``lightning_gnn.ops.hashing`` and the picks it drives, on the device.

A pick is a function of (key, node, j) alone, in a disjoint sample of the tree's position too, so any program may
compute it, in any order, as often as it likes.
"""

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
NODE_STEP = tl.constexpr(0xD1342543DE82EF95)


@triton.jit
def mix(z):
    """Finalise splitmix64; ``z`` is uint64 of any shape."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def node_key(key, node):
    """Return the uint64 streams of nodes ``[R]`` in the batch with the int64 scalar ``key``, or in their trees."""
    return mix(key.to(tl.uint64) ^ (node.to(tl.uint64) * NODE_STEP))


@triton.jit
def tree_key(key, position):
    """Return the uint64 keys of trees, from that of their batch and the int64 positions ``[R]`` of their seeds."""
    return mix((key.to(tl.uint64) + GOLDEN) ^ (position.to(tl.uint64) * NODE_STEP))


@triton.jit
def bounded(counter, bound):
    """Draw an int32 in ``[0, bound)`` from the upper half of the hash of a uint64 counter; ``1 <= bound < 2**31``."""
    return tl.umulhi((mix(counter) >> 32).to(tl.uint32), bound.to(tl.uint32)).to(tl.int32)


@triton.jit
def width(degree, fanout, replace):
    """Return how many in-edges a node of int32 ``degree`` contributes; a fanout below zero takes them all."""
    limited = tl.where(replace != 0, tl.where(degree > 0, fanout, 0), tl.minimum(degree, fanout))
    return tl.where(fanout < 0, degree, limited)


@triton.jit
def pick_row(stream, degree, fanout, replace, K: tl.constexpr):
    """Pick in-edges for one row per thread, in registers.

    The value that forward Fisher-Yates meets at a position is found by walking the earlier draws backwards: if draw i
    fell on the position, what stands there is what stood at position i before step i. So only the draws are kept.

    Args:
        stream: uint64 ``[R]``.
        degree: int32 ``[R]``.
        fanout: int32 scalar or ``[R]``.
        replace: Scalar, 1 to draw with replacement.
        K: Number of picks, at least the fanout; later ones are to be masked off.

    Returns:
        K tensors int32 ``[R]`` of offsets from the first in-edge.
    """
    draws = ()
    picks = ()
    in_order = (degree <= fanout) & (replace == 0)
    for j in tl.static_range(K):
        stream += GOLDEN
        start = tl.where(replace != 0, 0, j)
        r = bounded(stream, tl.maximum(degree - start, 1)) + start
        p = r
        for i in tl.static_range(j):
            p = tl.where((draws[j - 1 - i] == p) & (replace == 0), j - 1 - i, p)
        draws = draws + (r,)  # noqa: RUF005 (Triton has no unpacking)
        picks = picks + (tl.where(in_order, j, p),)  # noqa: RUF005
    return picks


@triton.jit
def pick_one(stream, j, degree, fanout, replace, on):
    """Pick the j-th in-edge for one edge per thread, for fanouts too large for registers and for all neighbours.

    The earlier draws are hashed again: O(j) work where ``degree > fanout``, O(1) otherwise.

    Args:
        stream: uint64 ``[T]``.
        j: int32 ``[T]``.
        degree: int32 ``[T]``.
        fanout: int32 scalar.
        replace: Scalar, 1 to draw with replacement.
        on: Mask ``[T]``.

    Returns:
        Offsets from the first in-edge, int32 ``[T]``.
    """
    drawn = on & (fanout >= 0) & ((degree > fanout) | (replace != 0))
    start = tl.where(replace != 0, 0, j)
    p = start + bounded(stream + (j + 1).to(tl.uint64) * GOLDEN, tl.maximum(degree - start, 1))
    i = tl.max(tl.where(drawn & (replace == 0), j, 0), 0) - 1
    while i >= 0:
        r = i + bounded(stream + (i + 1).to(tl.uint64) * GOLDEN, tl.maximum(degree - i, 1))
        p = tl.where((i < j) & (r == p), i, p)
        i -= 1
    return tl.where(drawn, p, j)

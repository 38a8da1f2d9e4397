"""Device version of the random stream of ``lightning_gnn.ops.hashing`` and of the edge picks drawn from it.

A pick depends only on (key, node, j) and, in a disjoint sample, on the tree's position. Arguments of device functions
are an ``Array`` (pointer), a ``Scalar`` (the same in all threads of a program) or ``Lanes`` (one value per thread).
"""

from typing import TypeAlias

import triton
import triton.language as tl

Array: TypeAlias = tl.tensor
Scalar: TypeAlias = tl.tensor
Lanes: TypeAlias = tl.tensor

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
NODE_STEP = tl.constexpr(0xD1342543DE82EF95)


@triton.jit
def mix(z: Lanes) -> Lanes:
    """Apply the finalizer of splitmix64; ``z`` is uint64 of any shape."""
    # In uint64, where products wrap and shifts fill with zeros: the bits must equal those of the other backends.
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def node_key(key: Lanes, node: Lanes) -> Lanes:
    """Return the uint64 streams of nodes ``[R]``, from the int64 key of the batch or the keys of their trees."""
    return mix(key.to(tl.uint64) ^ (node.to(tl.uint64) * NODE_STEP))


@triton.jit
def tree_key(key: Scalar, position: Lanes) -> Lanes:
    """Return the uint64 keys of trees, from the key of their batch and the int64 positions ``[R]`` of their seeds."""
    return mix((key.to(tl.uint64) + GOLDEN) ^ (position.to(tl.uint64) * NODE_STEP))


@triton.jit
def layer_key(key: Scalar, hop: Scalar) -> Scalar:
    """Return the uint64 key of a hop, from the key of its batch."""
    return mix((key.to(tl.uint64) + GOLDEN + GOLDEN) ^ (hop.to(tl.uint64) * NODE_STEP))


@triton.jit
def bounded(counter: Lanes, bound: Lanes) -> Lanes:
    """Draw an int32 in ``[0, bound)`` from the upper half of the hash of a uint64 counter; ``1 <= bound < 2**31``."""
    # (h * bound) >> 32 instead of h % bound: one multiplication, as GPUs have no remainder instruction.
    return tl.umulhi((mix(counter) >> 32).to(tl.uint32), bound.to(tl.uint32)).to(tl.int32)


@triton.jit
def width(degree: Lanes, fanout: Lanes, replace: Scalar) -> Lanes:
    """Return the number of in-edges picked for a node of int32 ``degree``; a negative fanout takes all."""
    limited = tl.where(replace != 0, tl.where(degree > 0, fanout, 0), tl.minimum(degree, fanout))
    return tl.where(fanout < 0, degree, limited)


@triton.jit
def pick_row(stream: Lanes, degree: Lanes, fanout: Lanes, replace: Scalar, K: tl.constexpr) -> tuple[Lanes, ...]:
    """Pick K in-edges for one row per thread, in registers: K offsets int32 ``[R]``, valid up to the fanout."""
    # Tuples of K blocks, unrolled: each draw stays in its own register; an array indexed at run time would go to local
    # memory. The inner loop makes K^2 / 2 comparisons, which are cheap compared with the gathers that follow.
    draws = ()
    picks = ()
    in_order = (degree <= fanout) & (replace == 0)  # all edges are taken: in CSC order, ignoring the draws
    for j in tl.static_range(K):
        stream += GOLDEN  # splitmix64 in counter mode: draw j hashes stream + (j + 1) * GOLDEN
        start = tl.where(replace != 0, 0, j)
        # A draw past the end of the row is not used, but its bound must not be 0.
        r = bounded(stream, tl.maximum(degree - start, 1)) + start
        p = r
        for i in tl.static_range(j):
            p = tl.where((draws[j - 1 - i] == p) & (replace == 0), j - 1 - i, p)
        draws = draws + (r,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no unpacking)
        picks = picks + (tl.where(in_order, j, p),)  # type: ignore[assignment]  # noqa: RUF005
    return picks


@triton.jit
def pick_one(stream: Lanes, j: Lanes, degree: Lanes, fanout: Scalar, replace: Scalar, on: Lanes) -> Lanes:
    """Pick the j-th in-edge, one edge per thread, int32 ``[T]``; O(j) hashes where ``degree > fanout``."""
    drawn = on & (fanout >= 0) & ((degree > fanout) | (replace != 0))
    start = tl.where(replace != 0, 0, j)
    p = start + bounded(stream + (j + 1).to(tl.uint64) * GOLDEN, tl.maximum(degree - start, 1))
    # One loop for the whole tile: its largest j sets the length, and the other lanes wait.
    i = tl.max(tl.where(drawn & (replace == 0), j, 0), 0) - 1
    while i >= 0:
        r = i + bounded(stream + (i + 1).to(tl.uint64) * GOLDEN, tl.maximum(degree - i, 1))
        p = tl.where((i < j) & (r == p), i, p)
        i -= 1
    return tl.where(drawn, p, j)

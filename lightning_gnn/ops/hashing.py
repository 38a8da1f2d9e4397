"""Counter-based random stream shared by all sampling backends: a pick depends on (key, node, j) alone.

The mixer is the finalizer of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

from typing import Any

import numba
import numpy as np

_MASK = (1 << 64) - 1
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
GOLDEN = 0x9E3779B97F4A7C15
NODE_STEP = 0xD1342543DE82EF95


def mix(z: int) -> int:
    """Hash the lower 64 bits of an integer to an unsigned 64-bit integer; every input bit affects every output bit."""
    z &= _MASK
    z = (z ^ (z >> 30)) * MIX_1 & _MASK
    z = (z ^ (z >> 27)) * MIX_2 & _MASK
    return z ^ (z >> 31)


class BatchKey(int):
    """A 64-bit key of a mini-batch, with the key of its epoch and its number in the epoch (:func:`batch_key`)."""

    epoch_key: int
    number: int


def batch_key(seed: int, rank: int = 0, loader: int = 0, epoch: int = 0, batch: int = 0) -> BatchKey:
    """Derive the key of one mini-batch, a signed 64-bit integer, from the user's random seed and the batch's position.

    The position consists of the rank, the number of the loader (training, validation, …), the epoch (pass over the seed
    nodes), and the number of the mini-batch in the epoch.
    """
    key = mix(seed + GOLDEN)
    epoch_key = key
    for number in (rank, loader, epoch, batch):
        epoch_key, key = key, mix((key + GOLDEN) ^ (number * NODE_STEP))
    out = BatchKey(key - (1 << 64) if key >> 63 else key)
    out.epoch_key, out.number = epoch_key, batch
    return out


def key_of_part(key: int, first: int) -> BatchKey:
    """Derive the key of a slice of a mini-batch from the position of its first seed; ``number`` is unchanged."""
    out = batch_key(key, first)
    if isinstance(key, BatchKey):
        out.epoch_key, out.number = batch_key(key.epoch_key, first) & _MASK, key.number
    return out


def tree_key(key: int, position: int) -> int:
    """Derive the key of one tree from its batch's key and its seed's position in the batch (all unsigned 64-bit)."""
    return mix((key + GOLDEN) ^ (position * NODE_STEP))


def relation_key(key: int, number: int) -> int:
    """Derive the key of an edge type (or node type) from the batch's key; type 0 uses the batch's key itself."""
    return key & _MASK if number == 0 else mix((key - GOLDEN) ^ (number * NODE_STEP))


def layer_key(key: int, hop: int) -> int:
    """Derive the key of one hop from the batch's key (all unsigned 64-bit)."""
    return mix((key + 2 * GOLDEN) ^ (hop * NODE_STEP))


def node_key(key: int, node: int) -> int:
    """Derive the stream of one node from the key of its batch or tree (both unsigned 64-bit)."""
    return mix(key ^ (node * NODE_STEP))


def draw(stream: int, j: int, bound: int) -> int:
    """Return the j-th integer of a node's stream, in ``[0, bound)``, computed from the upper 32 bits of a hash."""
    return (mix(stream + (j + 1) * GOLDEN) >> 32) * bound >> 32


def draw_fraction(stream: int, j: int) -> float:
    """Return the j-th fraction of a node's stream, in ``[0, 1)``, computed from the upper 53 bits of a hash."""
    return (mix(stream + (j + 1) * GOLDEN) >> 11) * 2.0**-53


Word = Any  # a uint64 of compiled code; NumPy's type stubs do not cover its arithmetic
_U11, _U30, _U27, _U31, _U32 = (np.uint64(s) for s in (11, 30, 27, 31, 32))
_UMIX_1, _UMIX_2 = np.uint64(MIX_1), np.uint64(MIX_2)
_UGOLDEN, _UNODE_STEP = np.uint64(GOLDEN), np.uint64(NODE_STEP)


@numba.njit(inline="always", cache=True)
def mix_compiled(z: Word) -> Word:
    """Compiled version of :func:`mix`; ``z`` is uint64."""
    z = (z ^ (z >> _U30)) * _UMIX_1
    z = (z ^ (z >> _U27)) * _UMIX_2
    return z ^ (z >> _U31)


@numba.njit(inline="always", cache=True)
def tree_key_compiled(key: Word, position: int) -> Word:
    """Compiled version of :func:`tree_key`."""
    return mix_compiled((key + _UGOLDEN) ^ (np.uint64(position) * _UNODE_STEP))


@numba.njit(inline="always", cache=True)
def node_key_compiled(key: Word, node: int) -> Word:
    """Compiled version of :func:`node_key`."""
    return mix_compiled(key ^ (np.uint64(node) * _UNODE_STEP))


@numba.njit(inline="always", cache=True)
def draw_compiled(stream: Word, j: int, bound: int) -> Any:
    """Compiled version of :func:`draw`."""
    # The upper half of a 32 x 32-bit product is below the bound: this needs neither a division nor a branch.
    z = mix_compiled(stream + np.uint64(j + 1) * _UGOLDEN)
    return np.int64(((z >> _U32) * np.uint64(bound)) >> _U32)


@numba.njit(inline="always", cache=True)
def draw_fraction_compiled(stream: Word, j: int) -> Any:
    """Compiled version of :func:`draw_fraction`."""
    return np.float64(mix_compiled(stream + np.uint64(j + 1) * _UGOLDEN) >> _U11) * 2.0**-53

"""What the GPU of NeutronAscend's figure 15, an NVIDIA RTX A5000, needs at the least for a GCN epoch: a roofline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

GB_S, TFLOPS = 768.0, 27.8
"""Published: bytes of memory, and float32 products and sums, a second."""
_SIZE = 4  # bytes of a float32, and of an index


def gpu_milliseconds(nodes: int, edges: int, widths: Sequence[int]) -> float:
    """Return the least time of an epoch of the same work, kernel after kernel, float32.

    An aggregation reads a row per edge, as if no cache held any, as the features of the large graphs do not fit its
    6 MB; a product takes the longer of its bytes and its operations.

    Args:
        nodes: Of the graph.
        edges: Of the graph, with self-loops.
        widths: Features, hidden channels, classes.
    """
    seconds = 0.0
    for width, out in pairwise(widths):
        aggregated = edges * (width + 1) * _SIZE + nodes * width * _SIZE
        multiplied = max((nodes * (width + out) * _SIZE) / (GB_S * 1e9), 2 * nodes * width * out / (TFLOPS * 1e12))
        seconds += 2 * aggregated / (GB_S * 1e9) + 3 * multiplied  # forward and backward; and the weight's gradient
    return 1e3 * seconds

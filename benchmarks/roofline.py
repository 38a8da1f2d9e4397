"""Lower bound of an epoch's time on a machine: bytes to move, and products."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch_geometric.data import Data

from lightning_gnn.planning.limits import MachineLimits

_ID = 8


def roofline(batch: Data, widths: tuple[int, ...], model: str, batches: int, limits: MachineLimits) -> dict[str, Any]:
    """Return the bytes and products of a trimmed epoch, each counted once, and the lower bound of their time.

    Bytes: features are gathered (read and written), each edge's row is read once per aggregation (forward, and backward
    except in the first layer; attention aggregates after the product), each layer's output is written and read twice.
    Products: forward, the weights' gradients, and except in the first layer those of the inputs. Nothing overlaps.
    """
    nodes, edges = list(accumulate(batch.num_sampled_nodes)), list(accumulate(batch.num_sampled_edges))
    size = batch.x.element_size()
    layers = len(widths) - 1
    moved, flops = 2 * nodes[-1] * widths[0] * size + 2 * _ID * edges[-1], 0
    for layer in range(layers):
        sources, targets = nodes[layers - layer], nodes[layers - layer - 1]
        own_edges = edges[layers - layer - 1]
        wide, narrow = widths[layer], widths[layer + 1]
        heads = 4 if model == "GAT" and layer == layers - 1 else 1  # the last layer's heads have full width
        read = narrow * heads if model == "GAT" else min(wide, narrow)
        passes = 1 + (layer > 0 or model == "GAT")
        moved += passes * own_edges * (read * size + _ID) + 4 * targets * narrow * size
        rows = sources if model == "GAT" or narrow < wide else targets
        products = rows * wide * narrow * heads + (targets * wide * narrow if model == "SAGE" else 0)
        flops += 2 * products * (2 + (layer > 0))
    found, seconds = _bound(moved, flops, limits, " per batch")
    return {**found, "bound s": float(f"{batches * seconds:.4g}")}


def full_graph_roofline(
    nodes: int, edges: int, widths: tuple[int, ...], model: str, heads: int, limits: MachineLimits
) -> dict[str, Any]:
    """Return the bytes and products of a full-graph epoch, and the lower bound of their time.

    Bytes: each edge's row is read once per pass, without cache hits (so caches can beat this bound). GCN aggregates
    constant features once for all epochs, and after the product if that is narrower; it has one forward and one
    backward pass per further layer. Attention has three passes per layer (sums, gradients of the weights and of the
    values). Each layer's output is written and read twice, forward and backward. Products as in :func:`roofline`.
    """
    size, moved, flops = 4, 0, 0
    for layer in range(len(widths) - 1):
        wide, narrow = widths[layer], widths[layer + 1]
        last = layer == len(widths) - 2
        narrow *= heads if model == "GAT" and last else 1
        passes, read = (3, narrow) if model == "GAT" else (2 * (layer > 0), min(wide, narrow))
        moved += passes * (edges + nodes) * (read * size + _ID) + 4 * nodes * narrow * size
        flops += 2 * nodes * wide * narrow * (2 + (layer > 0))
    found, seconds = _bound(moved, flops, limits, " per epoch")
    return {**found, "bound ms": float(f"{1e3 * seconds:.4g}")}


def _bound(moved: float, flops: float, limits: MachineLimits, per: str) -> tuple[dict[str, Any], float]:
    seconds = moved / limits.copy_bandwidth, flops / limits.flops
    found = {
        f"GB{per}": round(moved / 1e9, 4),
        f"GFLOP{per}": round(flops / 1e9, 3),
        "GB/s copied": round(limits.copy_bandwidth / 1e9, 2),
        "GFLOP/s": round(limits.flops / 1e9, 1),
        "ms of bytes": round(1e3 * seconds[0], 2),
        "ms of products": round(1e3 * seconds[1], 2),
    }
    return found, sum(seconds)

"""Counts what the layers' compiled kernels read and write on a mini-batch, against what they would need at least.

``python -m tests.ptx.layer_counts > benchmarks/results/gpu_layers.json``, then ``python -m docs.tables``. For each case
and kernel: the resource usage on sm_90, the sectors of 32 bytes that its warps touch, and the ideal, which moves the
row of an edge once per edge, and everything else once.
"""

import json
import sys

import torch
import triton

from benchmarks.gpu.kernel_usage import usage_of_ptx
from lightning_gnn.datasets.synthetic import power_law_graph
from lightning_gnn.graph.csc import CSCGraph
from lightning_gnn.ops import dropout, sample_neighbors
from lightning_gnn.ops.aggregate_update import triton as updates
from lightning_gnn.ops.aggregate_update.edge_order import edges_by_source, edges_by_target
from lightning_gnn.ops.attention import triton as attention
from lightning_gnn.ops.attention.reference import Attend, Layout
from lightning_gnn.triton_kernels import edge_sums
from tests.ptx import cases  # noqa: F401  installs the driver
from tests.ptx.counts import count

INT, LONG = 4, 8
BYTES = {torch.float32: 4, torch.bfloat16: 2}


def draw_layer():
    """Return the sorted edges of the first layer of a mini-batch, and the number of sources."""
    indptr, indices = power_law_graph(20_000, 500_000, exponent=3.0, seed=0)
    seeds = torch.randperm(20_000, generator=torch.Generator().manual_seed(1))[:64]
    out = sample_neighbors(CSCGraph.from_csc(indptr, indices.int()), seeds, (15, 10), 1, backend="numba")
    edge_index, num_nodes = out[1], list(out.num_sampled_nodes)
    return edges_by_target(edge_index, sum(num_nodes), sum(num_nodes[:2]), None), sum(num_nodes)


EDGES, N = draw_layer()
T, E = EDGES[0].numel() - 1, EDGES[1].numel()


def summed(columns, dtype):
    """GraphSAGE: means with own rows beside, and sums by source in the backward pass."""
    row, x = columns * BYTES[dtype], torch.randn(N, columns).to(dtype)
    both, grad = x.new_empty(T, 2 * columns), torch.empty_like(x)
    by_source = edges_by_source(EDGES, N)
    edge_sums.sum_rows(EDGES, x, both, mean=True, own=x, beside=True)
    edge_sums.sum_rows(by_source, both[:, :columns], grad, over=EDGES[0], own=both[:, columns:])
    rows = [(E + T) * row + (E + T) * INT, 2 * T * row], [(E + T) * row + (2 * E + N + T) * INT, N * row]
    return {"sum_kernel": rows[0], "sum_kernel, backward": rows[1]}


def largest(columns, dtype):
    """Maxima and their gradients."""
    row, x = columns * BYTES[dtype], torch.randn(N, columns).to(dtype)
    out, ties = updates.aggregate_rows(EDGES, x, "max")
    updates.aggregate_rows_backward(EDGES, out, x, out, ties, "max")
    return {
        "max_kernel": [E * row + (E + T) * INT, T * (row + columns * INT)],
        "route_kernel": [(N + 2 * E) * row + E * columns * INT + (E + N) * INT, N * row],
    }


def attended(kind, heads, channels, dtype):
    """Attention: a pass by target, and two in the backward pass."""
    columns, size = heads * channels, BYTES[dtype]
    row, values = columns * size, torch.randn(N, columns).to(dtype)
    keyed, dynamic = kind == "keys", kind == "dynamic"
    side = torch.randn(T if keyed else 1, heads, channels).to(dtype)
    shift = torch.randn(T, columns if dynamic else heads).to(dtype)
    keys = torch.randn(N, columns).to(dtype) if keyed else None
    call = Attend(EDGES, values, side, shift, None, None, Layout([T], [1], keyed), 0.2, dynamic, keys)
    out, mass, *saved = attention.attend(call, False, False)
    attention.attend_backward(call, out, mass, saved, [True, True, True, False, keyed])
    own = T * (row if dynamic else heads * size)  # shifts
    sides, score = (T if keyed else 1) * row, heads * INT
    read = 2 if keyed else 1  # keys and values
    source = [
        (N * read + E) * row + E * (2 * score + 2 * LONG) + N * LONG,
        N * read * row + E * score + (0 if keyed else row),
    ]
    # Shifts and sides are read per edge where they belong to targets.
    source[0] += E * (row if dynamic else heads * size) + (E * (row + INT) if keyed else row)
    by_row = [E * score + T * LONG, own]
    if keyed or dynamic:  # which read the scored rows again
        by_row = [
            by_row[0] + E * (row + INT) + (own + row if dynamic else 0),
            own + (T * columns * INT if keyed else 0),
        ]
    return {
        "attend_kernel": [
            E * (read * row + INT) + T * LONG + own + sides + (T * INT if keyed else 0),
            T * (row + score),
        ],
        "source_gradients_kernel": source,
        "row_gradients_kernel": by_row,
    }


def dropped(columns, dtype):
    """Dropout after a ReLU."""
    x = torch.randn(N, columns).to(dtype)
    dropout.relu_dropout_cuda(x, 0.5, 3)
    return {"row_dropout_kernel": [x.numel() * BYTES[dtype]] * 2}


CASES = {
    "GraphSAGE, 100 columns, float32": lambda: summed(100, torch.float32),
    "GraphSAGE, 256 columns, float32": lambda: summed(256, torch.float32),
    "GraphSAGE, 256 columns, bfloat16": lambda: summed(256, torch.bfloat16),
    "maximum, 256 columns, float32": lambda: largest(256, torch.float32),
    "GAT, 8 x 32, float32": lambda: attended("static", 8, 32, torch.float32),
    "GAT, 8 x 32, bfloat16": lambda: attended("static", 8, 32, torch.bfloat16),
    "GATv2, 8 x 32, float32": lambda: attended("dynamic", 8, 32, torch.float32),
    "GraphTransformer, 8 x 32, float32": lambda: attended("keys", 8, 32, torch.float32),
    "dropout, 256 columns, float32": lambda: dropped(256, torch.float32),
}


def rows_of(case):
    """Yield a row for each kernel of a case in the order of launches; that of long rows has no ideal."""
    ideals, seen = {}, set()
    for name, _, counts, compiled in count(lambda: ideals.update(CASES[case]())):
        label = f"{name}, backward" if name in seen else name
        seen.add(name)
        row = {"case": case, "kernel": label, **usage_of_ptx(*compiled, 90)}
        for kind, least in zip(("load", "store"), ideals.get(label, ()), strict=False):
            sectors = sum(n for (site, what), n in counts.items() if (site.kind, what) == (kind, "sectors"))
            row[f"{kind}s"] = [sectors, round(least / 32)]
        yield row


def main():
    names = sys.argv[1:] or list(CASES)
    rows = [row for case in names for row in rows_of(case)]
    sizes = {"sources": N, "targets": T, "edges": E}
    print(json.dumps({"triton": triton.__version__, **sizes, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

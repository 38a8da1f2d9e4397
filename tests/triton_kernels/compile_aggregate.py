"""Compile the aggregation kernels for GPUs that need not be there; run by ``compiling.py``."""

import re

import torch
import triton

from lightning_gnn.triton_kernels import aggregate, edge_softmax
from tests.triton_kernels.compiling import compiled, targets, usage

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
LONG = ("starts", "stops", "slot_ptr")
INTS = ("indices", "places", "vertices", "degrees", "shared")
SCRATCH = ("scratch", "stats")
BIG = 10**6  # rows of x


def sums(kind, heads, channels, **flags):
    block = aggregate.block_shape(BIG, heads, channels, DTYPES[kind], 50 * 2**20)
    flags = {"GATHER": True, "WEIGHTED": False, "MEAN": False, "MATCH": False, **flags}
    blocks = {"ENTRIES": block.entries, "HEAD_TILE": block.heads, "WIDTH": block.width}
    sizes = {"x_stride": heads * channels, "HEADS": heads, "CHANNELS": channels}
    return aggregate.rows_kernel, kind, {**sizes, **flags, **blocks}


def maxima(kind, heads, channels, gather):
    block = aggregate.block_shape(BIG, heads, channels, DTYPES[kind], 50 * 2**20)
    blocks = {"ENTRIES": block.entries // 2, "HEAD_TILE": block.heads, "WIDTH": block.width}
    sizes = {"x_stride": heads * channels, "HEADS": heads, "CHANNELS": channels}
    return aggregate.max_kernel, kind, {**sizes, "GATHER": gather, "WEIGHTED": gather, **blocks}


def scores(kernel, kind, heads, **flags):
    block = edge_softmax.score_block(heads)
    blocks = {"HEAD_TILE": block.heads}
    if "ENTRIES" in kernel.arg_names:
        blocks |= {"ENTRIES": block.entries, "NEGATIVE_SLOPE": 0.2}
    return kernel, kind, {"HEADS": heads, **flags, **blocks}


def products(kind, heads, channels, match):
    block = edge_softmax.product_block(heads, channels, DTYPES[kind])
    sizes = {"row_stride": heads * channels, "column_stride": heads * channels, "HEADS": heads, "CHANNELS": channels}
    blocks = {"ENTRIES": block.entries, "HEAD_TILE": block.heads, "WIDTH": block.width}
    return edge_softmax.products_kernel, kind, {**sizes, "MATCH": match, **blocks}


VARIANTS = [
    sums("fp32", 1, 256),
    sums("fp16", 1, 100, WEIGHTED=True, MEAN=True),
    sums("fp32", 8, 8, WEIGHTED=True),
    sums("bf16", 1, 41, WEIGHTED=True),
    sums("fp64", 1, 64, WEIGHTED=True),
    sums("fp32", 1, 128, GATHER=False),
    sums("fp32", 1, 128, WEIGHTED=True, MATCH=True),
    maxima("fp32", 1, 128, True),
    maxima("fp32", 1, 128, False),
    scores(edge_softmax.softmax_kernel, "fp32", 8, FINISH=False),
    scores(edge_softmax.softmax_kernel, "fp64", 1, FINISH=True),
    scores(edge_softmax.softmax_backward_kernel, "fp16", 8, FINISH=False),
    scores(edge_softmax.combine_kernel, "fp32", 8, SOFTMAX=True),
    products("fp32", 8, 8, False),
    products("bf16", 1, 256, True),
]


def made_of(kernel, kind, constants, capability):
    wide = "fp64" if kind == "fp64" else "fp32"
    if "ACC" in kernel.arg_names:
        constants = {**constants, "ACC": getattr(triton.language, f"float{wide[2:]}")}
    pointers = dict.fromkeys(LONG, "*i64") | dict.fromkeys(INTS, "*i32") | dict.fromkeys(SCRATCH, f"*{wide}")
    return compiled(kernel, kind, constants, pointers, capability, num_warps=aggregate.NUM_WARPS)


def rows(number):
    """Yield what each variant of a slice needs of a GPU, and its instructions."""
    for capability, (kernel, kind, constants) in targets(VARIANTS, number):
        made = made_of(kernel, kind, constants, capability)
        found = sorted(set(re.findall(r"ld\.global[.\w]*|atom[.\w]*", made.asm["ptx"])))
        row = dict(kernel=kernel.fn.__name__, sm=capability, kind=kind, **usage(made))
        row |= {name: value for name, value in constants.items() if isinstance(value, int)}
        yield row | {"instructions": found}

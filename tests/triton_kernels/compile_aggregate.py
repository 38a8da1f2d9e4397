"""Compile the aggregation kernels for GPUs that need not be installed; run by ``compiling.py``."""

import re

import torch
import triton

from lightning_gnn.triton_kernels import aggregate, edge_softmax
from tests.triton_kernels.compiling import compile_kernel, list_targets, usage

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
LONG = ("starts", "stops", "slot_ptr")
INTS = ("indices", "places", "vertices", "degrees", "shared")
SCRATCH = ("scratch", "stats")
BIG = 10**6  # rows of x


def make_sum_constants(kind, heads, channels, **flags):
    block = aggregate.block_shape(BIG, heads, channels, DTYPES[kind], 50 * 2**20)
    flags = {"GATHER": True, "WEIGHTED": False, "MEAN": False, "MATCH": False, **flags}
    blocks = {"ENTRIES": block.entries, "HEAD_TILE": block.heads, "WIDTH": block.width, "num_warps": block.warps}
    sizes = {"x_stride": heads * channels, "HEADS": heads, "CHANNELS": channels}
    return aggregate.rows_kernel, kind, {**sizes, **flags, **blocks}


def make_max_constants(kind, heads, channels, gather):
    block = aggregate.block_shape(BIG, heads, channels, DTYPES[kind], 50 * 2**20)
    blocks = {"ENTRIES": block.entries // 2, "HEAD_TILE": block.heads, "WIDTH": block.width, "num_warps": block.warps}
    sizes = {"x_stride": heads * channels, "HEADS": heads, "CHANNELS": channels}
    return aggregate.max_kernel, kind, {**sizes, "GATHER": gather, "WEIGHTED": gather, **blocks}


def make_score_constants(kernel, kind, heads, **flags):
    block = edge_softmax.score_block(heads)
    blocks = {"HEAD_TILE": block.heads}
    if "ENTRIES" in kernel.arg_names:
        blocks |= {"ENTRIES": block.entries, "NEGATIVE_SLOPE": 0.2}
    return kernel, kind, {"HEADS": heads, **flags, **blocks}


def make_product_constants(kind, heads, channels, match):
    block = edge_softmax.product_block(heads, channels, DTYPES[kind])
    sizes = {"row_stride": heads * channels, "column_stride": heads * channels, "HEADS": heads, "CHANNELS": channels}
    blocks = {"ENTRIES": block.entries, "HEAD_TILE": block.heads, "WIDTH": block.width}
    return edge_softmax.products_kernel, kind, {**sizes, "MATCH": match, **blocks}


VARIANTS = [
    make_sum_constants("fp32", 1, 256),
    make_sum_constants("fp16", 1, 100, WEIGHTED=True, MEAN=True),
    make_sum_constants("fp32", 8, 8, WEIGHTED=True),
    make_sum_constants("bf16", 1, 41, WEIGHTED=True),
    make_sum_constants("fp64", 1, 64, WEIGHTED=True),
    make_sum_constants("fp32", 1, 128, GATHER=False),
    make_sum_constants("fp32", 1, 128, WEIGHTED=True, MATCH=True),
    make_max_constants("fp32", 1, 128, True),
    make_max_constants("fp32", 1, 128, False),
    make_score_constants(edge_softmax.softmax_kernel, "fp32", 8, FINISH=False),
    make_score_constants(edge_softmax.softmax_kernel, "fp64", 1, FINISH=True),
    make_score_constants(edge_softmax.softmax_backward_kernel, "fp16", 8, FINISH=False),
    make_score_constants(edge_softmax.combine_kernel, "fp32", 8, SOFTMAX=True),
    make_product_constants("fp32", 8, 8, False),
    make_product_constants("bf16", 1, 256, True),
]


def compile_variant(kernel, kind, constants, capability):
    wide = "fp64" if kind == "fp64" else "fp32"
    if "ACC" in kernel.arg_names:
        constants = {**constants, "ACC": getattr(triton.language, f"float{wide[2:]}")}
    pointers = dict.fromkeys(LONG, "*i64") | dict.fromkeys(INTS, "*i32") | dict.fromkeys(SCRATCH, f"*{wide}")
    warps = constants.get("num_warps", 1)
    constants = {name: value for name, value in constants.items() if name != "num_warps"}
    return compile_kernel(kernel, kind, constants, pointers, capability, num_warps=warps)


def generate_rows(number):
    """Yield the GPU resources and the instructions of each variant of a slice."""
    for capability, (kernel, kind, constants) in list_targets(VARIANTS, number):
        made = compile_variant(kernel, kind, constants, capability)
        found = sorted(set(re.findall(r"ld\.global[.\w]*|atom[.\w]*", made.asm["ptx"])))
        row = dict(kernel=kernel.fn.__name__, sm=capability, kind=kind, **usage(made))
        row |= {name: value for name, value in constants.items() if isinstance(value, int)}
        yield row | {"instructions": found}

"""Compile the attention kernels for GPUs that need not be installed; run by ``compiling.py``."""

import re

import triton.language as tl

from lightning_gnn.triton_kernels import attention
from tests.triton_kernels.compiling import compile_kernel, list_targets, usage

INTS = {"indptr": "*i64", "rows": "*i64", "edges": "*i64", "indices": "*i32", "sides": "*i32"}
WIDE = ("lse", "delta", "partial", "grad_scores", "grad_side")
SHAPES = {
    "GAT": {},
    "GATv2": {"DYNAMIC": True},
    "first": {"STEP": 0},
    "sides": {"STEP": 0, "ONE_SIDE": False},
    "keys": {"ONE_SIDE": False},
}


def make(kernel, kind, layer, heads, channels):
    flags = {"STEP": channels, "ONE_SIDE": True, "DYNAMIC": False, "KEYED": layer == "keys", **SHAPES[layer]}
    flags |= {"COLUMNS": channels * heads if flags["STEP"] else channels, "FACTORED": layer == "GAT", "MASS": False}
    return kernel, kind, {"SLOPE": 0.2, "HEADS": heads, "CHANNELS": channels, **flags}


KERNELS = attention.attend_kernel, attention.source_gradients_kernel, attention.row_gradients_kernel
VARIANTS = [
    make(kernel, kind, layer, heads, channels)
    for kernel in KERNELS
    for kind, layer, heads, channels in (
        ("fp32", "GAT", 8, 32),
        ("bf16", "GAT", 8, 32),
        ("fp32", "GATv2", 8, 32),
        ("bf16", "GATv2", 8, 32),
        ("fp64", "GATv2", 3, 5),
        ("fp16", "GAT", 1, 47),
        ("fp32", "first", 8, 100),
        ("fp32", "sides", 4, 128),
        ("fp32", "keys", 8, 32),
        ("bf16", "keys", 8, 32),
    )
]


def compile_variant(kernel, kind, constants, capability):
    wide = "fp64" if kind == "fp64" else "fp32"
    constants = constants | attention.block_shape(constants["HEADS"], constants["CHANNELS"]) | {"ACC": tl.dtype(wide)}
    options = {name: constants.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    pointers = INTS | dict.fromkeys(WIDE, f"*{wide}") | dict.fromkeys(("num_rows", "num_sources"), "i32")
    return compile_kernel(kernel, kind, constants, pointers, capability, **options)


def generate_rows(number):
    """Yield the GPU resources and the atomic instructions of each variant of a slice."""
    for capability, (kernel, kind, constants) in list_targets(VARIANTS, number):
        made = compile_variant(kernel, kind, constants, capability)
        row = dict(kernel=kernel.fn.__name__, sm=capability, kind=kind, **usage(made))
        yield row | {"atomics": re.findall(r"\b(?:atom|red)\.\w+", made.asm["ptx"])}

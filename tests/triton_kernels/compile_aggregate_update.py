"""Compile the fused kernel for GPUs that need not be installed; run by ``compiling.py``."""

import re

from lightning_gnn.triton_kernels import aggregate_update as kernels
from tests.triton_kernels.compiling import compile_kernel, list_targets, usage

POINTERS = {"indptr": "*i64", "indices": "*i32", "num_targets": "i32"}
VARIANTS = [  # kind, in, out, weighted, keep, precision
    ("fp32", 256, 256, False, True, "tf32"),
    ("fp32", 100, 47, True, False, "tf32"),
    ("fp16", 256, 256, True, True, "ieee"),
    ("bf16", 602, 41, False, False, "ieee"),
]


def compile_variant(kind, wide, narrow, weighted, keep, precision, capability):
    flags = {"MEAN": True, "WEIGHTED": weighted, "SELF": True, "BIAS": True, "KEEP": keep, "PRECISION": precision}
    constants = {"IN": wide, "OUT": narrow, **flags, **kernels.tile_shape(wide, narrow)}
    options = {"num_warps": kernels.NUM_WARPS, "num_stages": kernels.NUM_STAGES}
    return compile_kernel(kernels.update_kernel, kind, constants, POINTERS, capability, **options)


def generate_rows(number):
    """Yield the GPU resources and the instructions of each variant of a slice."""
    for capability, variant in list_targets(VARIANTS, number):
        made = compile_variant(*variant, capability)
        found = sorted(set(re.findall(r"ld\.global[.\w]*|mma\.[.\w]*|wgmma[.\w]*", made.asm["ptx"])))
        row = {"sm": capability, "kind": variant[0], "in": variant[1], "out": variant[2]}
        row |= {"tf32": variant[5] == "tf32", **usage(made), "shared": made.metadata.shared, "instructions": found}
        yield row

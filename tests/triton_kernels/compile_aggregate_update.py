"""Compile the fused kernel for GPUs that need not be there; run by ``compiling.py``."""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_gnn.triton_kernels import aggregate_update as kernels
from tests.triton_kernels.compiling import targets, usage

POINTERS = {"indptr": "*i64", "indices": "*i32"}
VARIANTS = [  # kind, in, out, weighted, keep, precision
    ("fp32", 256, 256, False, True, "tf32"),
    ("fp32", 100, 47, True, False, "tf32"),
    ("fp16", 256, 256, True, True, "ieee"),
    ("bf16", 602, 41, False, False, "ieee"),
]


def compiled(kind, wide, narrow, weighted, keep, precision, capability):
    constants = {
        "IN": wide,
        "OUT": narrow,
        "MEAN": True,
        "WEIGHTED": weighted,
        "SELF": True,
        "BIAS": True,
        "KEEP": keep,
        "PRECISION": precision,
        **kernels.tile_shape(wide, narrow),
    }
    names = kernels.update_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else "i32" if name == "num_targets" else POINTERS.get(name, f"*{kind}")
        for name in names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernels.update_kernel, signature, constants, aligned)
    options = {"num_warps": kernels.NUM_WARPS, "num_stages": kernels.NUM_STAGES}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def rows(number):
    """Yield what each variant of a slice needs of a GPU, and its instructions."""
    for capability, variant in targets(VARIANTS, number):
        made = compiled(*variant, capability)
        found = sorted(set(re.findall(r"ld\.global[.\w]*|mma\.[.\w]*|wgmma[.\w]*", made.asm["ptx"])))
        row = {"sm": capability, "kind": variant[0], "in": variant[1], "out": variant[2]}
        row |= {"tf32": variant[5] == "tf32", **usage(made), "shared": made.metadata.shared, "instructions": found}
        yield row

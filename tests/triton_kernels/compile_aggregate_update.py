"""Compile the fused kernel for GPUs that need not be there; prints one JSON object per variant. Run as a script."""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_gnn.triton_kernels import aggregate_update as kernels

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
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


def main():
    for capability in (80, 90):
        for variant in VARIANTS:
            made = compiled(*variant, capability)
            usage = {}
            if CUOBJDUMP.exists():
                with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                    Path(file.name).write_bytes(made.asm["cubin"])
                    dump = subprocess.check_output([CUOBJDUMP, "-res-usage", file.name], text=True)
                usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump)}
            found = sorted(set(re.findall(r"ld\.global[.\w]*|mma\.[.\w]*|wgmma[.\w]*", made.asm["ptx"])))
            row = {"sm": capability, "kind": variant[0], "in": variant[1], "out": variant[2]}
            row |= {"tf32": variant[5] == "tf32", **usage, "shared": made.metadata.shared, "instructions": found}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""Compile the gather kernel for GPUs that need not be there; prints one JSON object per variant. Run as a script."""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_gnn.triton_kernels.gather import block_shape, gather_kernel

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
VARIANTS = [  # out, table, columns, cached
    ("i32", "i32", 1, True),
    ("i32", "i32", 100, True),
    ("i32", "i32", 602, False),
    ("i16", "i16", 129, False),
    ("i64", "i64", 7, False),
    ("fp32", "fp16", 128, False),
    ("fp32", "i8", 100, True),
    ("fp16", "i8", 129, True),
]


def compiled(out, table, columns, cached, capability):
    constants = {
        "num_columns": columns,
        "row_stride": columns,
        "COPY": out == table,
        "BAD": -1 if out == table else 0,
        "QUANTISED": table == "i8",
        "CACHED": cached,
    }
    constants["COLUMNS"], constants["ROWS"] = block_shape(columns)
    pointers = {"out": out, "index": "i64", "table": table, "scales": "fp32", "slot": "i32", "cache": table}
    signature = {name: f"*{kind}" for name, kind in pointers.items()} | {"num_out": "i32", "num_rows": "i32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    source = ASTSource(gather_kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})


def main():
    for capability in (80, 90):
        for out, table, columns, cached in VARIANTS:
            kernel = compiled(out, table, columns, cached, capability)
            usage = {}
            if CUOBJDUMP.exists():
                with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                    Path(file.name).write_bytes(kernel.asm["cubin"])
                    dump = subprocess.check_output([CUOBJDUMP, "-res-usage", file.name], text=True)
                usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump)}
            loads = sorted(set(re.findall(r"ld\.global[.\w]*", kernel.asm["ptx"])))
            row = dict(sm=capability, out=out, table=table, columns=columns, cached=cached, loads=loads, **usage)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

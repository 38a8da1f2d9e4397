"""Compile the gather kernel for GPUs that need not be installed; run by ``compiling.py``."""

import re

from lightning_gnn.triton_kernels.gather import block_shape, gather_kernel
from tests.triton_kernels.compiling import compile_kernel, list_targets, usage

VARIANTS = [  # out, table, columns, cached or the number of GPUs
    ("i32", "i32", 1, True),
    ("i32", "i32", 100, True),
    ("i32", "i32", 602, False),
    ("i16", "i16", 129, False),
    ("i64", "i64", 7, False),
    ("fp32", "fp16", 128, False),
    ("fp32", "i8", 100, True),
    ("fp16", "i8", 129, True),
    ("i32", "i32", 100, 8),
    ("fp32", "i8", 100, 8),
]


def compile_variant(out, table, columns, cached, capability):
    constants = {
        "num_columns": columns,
        "row_stride": columns,
        "COPY": out == table,
        "BAD": -1 if out == table else 0,
        "QUANTISED": table == "i8",
        "CACHED": cached is True,
        "SHARDS": max(1, int(cached)),
        "SHIFT": 0,
    }
    constants["COLUMNS"], constants["ROWS"] = block_shape(columns)
    pointers = {
        "out": f"*{out}",
        "index": "*i64",
        "scales": "*fp32",
        "slot": "*i32",
        "num_out": "i32",
        "num_rows": "i32",
    }
    pointers |= {"cache": "*i64"} if cached > 1 else {}
    return compile_kernel(gather_kernel, table, constants, pointers, capability, num_warps=4)


def generate_rows(number):
    """Yield the GPU resources and the instructions of each variant of a slice."""
    for capability, (out, table, columns, cached) in list_targets(VARIANTS, number):
        kernel = compile_variant(out, table, columns, cached, capability)
        loads = sorted(set(re.findall(r"ld\.global[.\w]*", kernel.asm["ptx"])))
        row = dict(sm=capability, out=out, table=table, columns=columns, cached=cached, loads=loads, **usage(kernel))
        yield row

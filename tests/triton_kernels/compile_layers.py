"""Compile the kernels of layers on mini-batches for GPUs that need not be installed; run by ``compiling.py``."""

import re

import triton.language as tl

from lightning_gnn.triton_kernels import dropout
from tests.triton_kernels.compiling import compile_kernel, list_targets, usage

INSTRUCTIONS = re.compile(r"ld\.global[.\w]*|atom[.\w]*|red\.global[.\w]*|bar\.sync")
TYPES = {"rows": "*i64", "key": "i64", "num_rows": "i32"}


def make_dropout(kind, columns, given, relu):
    constants = {"COLUMNS": columns, "GIVEN": given, "RELU": relu, "THRESHOLD": 2**31, "SCALE": 2.0}
    return dropout.row_dropout_kernel, kind, constants | dropout.block_shape(columns)


VARIANTS = [
    make_dropout("fp32", 256, False, True),
    make_dropout("fp32", 256, True, False),
    make_dropout("bf16", 47, True, False),
    make_dropout("fp64", 100, False, True),
]


def generate_rows(number):
    """Yield the GPU resources and the instructions of each variant of a slice."""
    for capability, (kernel, kind, constants) in list_targets(VARIANTS, number):
        if "ACC" in kernel.arg_names:
            constants = {**constants, "ACC": tl.float64 if kind == "fp64" else tl.float32}
        made = compile_kernel(kernel, kind, constants, TYPES, capability)
        row = dict(kernel=kernel.fn.__name__, sm=capability, kind=kind, **usage(made))
        row |= {name: value for name, value in constants.items() if isinstance(value, int)}
        yield row | {"instructions": sorted(set(INSTRUCTIONS.findall(made.asm["ptx"])))}

"""Compile the kernels of layers on mini-batches for GPUs that need not be installed; run by ``compiling.py``."""

import re

import triton.language as tl

from lightning_gnn.triton_kernels import dropout, edge_sums
from tests.triton_kernels.compiling import compile_kernel, list_targets, usage

INSTRUCTIONS = re.compile(r"ld\.global[.\w]*|atom[.\w]*|red\.global[.\w]*|bar\.sync")
TYPES = {"rows": "*i64", "key": "i64", "num_rows": "i32", "num_own": "i32", "indptr": "*i32", "over": "*i32"}
TYPES |= {"indices": "*i32", "ties": "*i32"}


def make_dropout(kind, columns, given, relu):
    constants = {"COLUMNS": columns, "GIVEN": given, "RELU": relu, "THRESHOLD": 2**31, "SCALE": 2.0}
    return dropout.row_dropout_kernel, kind, constants | dropout.block_shape(columns)


def make_sum(kind, columns, long=False, **flags):
    beside = flags.get("OWN") == edge_sums.OWN_BESIDE
    usual = {"OUT_STRIDE": columns * (1 + beside), "X_STRIDE": columns, "OWN_STRIDE": columns}
    usual |= dict.fromkeys(("WEIGHTED", "DIVIDED", "MEAN"), False) | {"OWN": edge_sums.NO_OWN}
    kernel, block = edge_sums.sum_kernel, edge_sums.block_shape(columns)
    if long:
        kernel, block = edge_sums.long_sum_kernel, edge_sums.long_block_shape(columns)
    return kernel, kind, {"COLUMNS": columns, "LONGEST": edge_sums.LONGEST, **usual, **flags, **block}


def make_max(kernel, kind, columns):
    return kernel, kind, {"COLUMNS": columns, **edge_sums.block_shape(columns)}


BACKWARD = {"DIVIDED": True, "OWN": edge_sums.OWN_ADDED, "X_STRIDE": 512, "OWN_STRIDE": 512}
VARIANTS = [
    make_sum("fp32", 100, MEAN=True, OWN=edge_sums.OWN_BESIDE),
    make_sum("fp32", 256, MEAN=True, OWN=edge_sums.OWN_BESIDE),
    make_sum("bf16", 256, MEAN=True, OWN=edge_sums.OWN_BESIDE),
    make_sum("fp32", 256, **BACKWARD),
    make_sum("bf16", 256, **BACKWARD),
    make_sum("fp32", 256, long=True, **BACKWARD),
    make_sum("fp32", 100, WEIGHTED=True),
    make_sum("fp16", 47, WEIGHTED=True),
    make_sum("fp32", 1, WEIGHTED=True),
    make_sum("fp32", 1, long=True, MEAN=True),
    make_sum("fp64", 64, MEAN=True),
    make_sum("fp64", 64, long=True, WEIGHTED=True),
    make_max(edge_sums.max_kernel, "fp32", 256),
    make_max(edge_sums.max_kernel, "bf16", 100),
    make_max(edge_sums.route_kernel, "fp32", 256),
    make_max(edge_sums.route_kernel, "fp64", 47),
    make_dropout("fp32", 256, False, True),
    make_dropout("fp32", 256, True, False),
    make_dropout("bf16", 47, True, False),
    make_dropout("fp64", 100, False, True),
]


def generate_rows(number):
    """Yield the GPU resources and the instructions of each variant of a slice."""
    for capability, (kernel, kind, given) in list_targets(VARIANTS, number):
        constants = dict(given)
        if "ACC" in kernel.arg_names:
            constants = {**constants, "ACC": tl.float64 if kind == "fp64" else tl.float32}
        warps = constants.pop("num_warps", 4)
        types = TYPES | {"weight": "*fp64" if kind == "fp64" else "*fp32"}
        made = compile_kernel(kernel, kind, constants, types, capability, num_warps=warps)
        row = dict(kernel=kernel.fn.__name__, sm=capability, kind=kind, **usage(made))
        row |= {name: value for name, value in constants.items() if isinstance(value, int)}
        yield row | {"instructions": sorted(set(INSTRUCTIONS.findall(made.asm["ptx"])))}

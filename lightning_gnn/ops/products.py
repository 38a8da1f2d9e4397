"""The precision in which a CPU multiplies fastest."""

import functools

import torch

from lightning_gnn.runtime.machine_rates import measured_once, product_rate

MIN_SPEEDUP = 1.2
"""Ratio of the rates of bfloat16 and float32 products from which on a CPU computes in bfloat16."""


@torch.compiler.assume_constant_result
def multiplies_bfloat16() -> bool:
    """Return whether this CPU multiplies at least 1.2 times as fast in bfloat16 as in float32; measured once."""
    return _multiplies_bfloat16()


@functools.cache
def _multiplies_bfloat16() -> bool:
    found = measured_once(
        "products in bfloat16",
        lambda: {"speedup": product_rate(torch.bfloat16) / product_rate(torch.float32)},
    )
    return bool(found["speedup"] >= MIN_SPEEDUP)

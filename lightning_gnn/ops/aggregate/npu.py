"""Aggregation and attention on an NPU: the binding of the Ascend C kernels, built on first use, or else torch's own.

The binding registers its kernels with torch's dispatcher (``ascend_ops/host/ops.cpp``); those of a maximum are
launched from here. What has no kernel, a maximum of float64 and the gradient of its weights, goes to the reference,
which is made of torch's operators.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.aggregate import reference as aggregate_reference
from lightning_gnn.ops.aggregate.chip_max import entries_of_chunks, maxima, maxima_backward
from lightning_gnn.ops.edge_softmax import reference as softmax_reference  # noqa: F401  defines the operators
from lightning_gnn.ops.library import define

define(
    "launch_kernel(str kernel, int blocks, Tensor[] inputs, Tensor(a!)[] outputs, Tensor tiling) -> ()",
    None,
)
aggregate_vector = torch.ops.lightning_gnn.aggregate_vector
edge_softmax = torch.ops.lightning_gnn.edge_softmax
edge_softmax_backward = torch.ops.lightning_gnn.edge_softmax_backward
edge_sums = torch.ops.lightning_gnn.edge_sums


@cache
def available() -> bool:
    """Say whether the NPU's kernels are there; the first call builds and loads them, or warns what is missing."""
    from lightning_gnn.ascend_ops import binding

    try:
        binding.load()
    except binding.BindingError as error:
        warnings.warn(f"{error}\nWithout them torch's own operators aggregate, more slowly.", stacklevel=2)
        return False
    return True


@cache
def num_cores(index: int) -> int:
    """Return the AI cores of an NPU, each of which is a worker of the plan; the plan means nothing to torch."""
    if not available():
        return torch.get_num_threads()
    count = ctypes.c_int64(0)
    runtime = ctypes.CDLL("libascendcl.so")
    ai_core_num = 0  # ACL_DEVICE_INFO_AI_CORE_NUM
    if runtime.aclGetDeviceCapability(ctypes.c_uint32(index), ai_core_num, ctypes.byref(count)) or count.value < 1:
        raise RuntimeError(f"CANN does not say how many cores NPU {index} has; set PlanSettings(num_workers=…)")
    return count.value


def launch(kernel: str, blocks: int, inputs: list[Tensor], outputs: list[Tensor], tiling: Any) -> None:
    """Launch a kernel on an NPU's tensors, on the current stream; ``ascend_twin.launch`` does the same in simulation.

    Args:
        outputs: Contiguous; their contents are replaced.
    """
    words = torch.from_numpy(tiling.view(np.int32)).to(outputs[0].device)
    torch.ops.lightning_gnn.launch_kernel(kernel, max(blocks, 1), inputs, outputs, words)


def aggregate_chunks(
    chunks: list[Tensor],
    num_rows: int,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    slices: list[int],
    chunk_ranges: list[int],
) -> tuple[Tensor, Tensor]:
    """Reduce the weighted rows of ``x`` over the entries of each vertex; ``definition.py`` defines it."""
    if reduce == "max" and x.dtype == torch.float32 and available():
        return maxima(launch, entries_of_chunks(chunks, len(slices) - 1, chunk_ranges), x, weight)
    lacks_kernel = reduce == "max" and available()
    function = aggregate_reference.aggregate_chunks if lacks_kernel else torch.ops.lightning_gnn.aggregate_chunks
    return function(chunks, num_rows, x, weight, reduce, slices, chunk_ranges)


def aggregate_max_backward(
    chunks: list[Tensor],
    num_rows: int,
    grad: Tensor,
    best: Tensor,
    x: Tensor,
    weight: Tensor | None,
    slices: list[int],
    chunk_ranges: list[int],
) -> Tensor:
    """Send the gradient of a maximum to the rows of ``x`` that attain it."""
    if x.dtype == torch.float32 and available():
        return maxima_backward(launch, entries_of_chunks(chunks, len(slices) - 1, chunk_ranges), grad, best, x, weight)
    return aggregate_reference.aggregate_max_backward(chunks, num_rows, grad, best, x, weight, slices, chunk_ranges)


def edge_products(
    chunks: list[Tensor],
    row_side: Tensor,
    column_side: Tensor,
    best: Tensor | None,
    weight: Tensor | None,
    slices: list[int],
    chunk_ranges: list[int],
) -> Tensor:
    """Take the dot product of both ends of each entry, per head; with ``best`` only over what attains the maximum."""
    lacks_kernel = best is not None and available()
    function = aggregate_reference.edge_products if lacks_kernel else torch.ops.lightning_gnn.edge_products
    return function(chunks, row_side, column_side, best, weight, slices, chunk_ranges)

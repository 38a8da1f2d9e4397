"""Aggregation and attention on an NPU: the binding of the Ascend C kernels, built on first use.

The binding registers kernels with torch's dispatcher (``ascend_ops/host/ops.cpp``); those of maxima start from here.
"""

import ctypes
import warnings
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.ops.library import define

_SUM = "(Tensor[] chunks, int num_rows, Tensor x, Tensor? weight, str reduce, int[] slices"
aggregate_chunks = define(f"aggregate_chunks{_SUM}, int[] chunk_ranges) -> (Tensor, Tensor)", None)
aggregate_vector = define(f"aggregate_vector{_SUM}, int[] chunk_ranges) -> (Tensor, Tensor)", None)
edge_products = define(
    "edge_products(Tensor[] chunks, Tensor row_side, Tensor column_side, Tensor? best, Tensor? weight, int[] slices,"
    " int[] chunk_ranges) -> Tensor",
    None,
)
edge_softmax = define(
    "edge_softmax(Tensor[] chunks, Tensor row_scores, Tensor column_scores, float negative_slope, int[] chunk_ranges)"
    " -> Tensor",
    None,
)
edge_softmax_backward = define(
    "edge_softmax_backward(Tensor[] chunks, Tensor row_scores, Tensor column_scores, float negative_slope,"
    " Tensor attention, Tensor grad, int[] chunk_ranges) -> Tensor",
    None,
)
edge_sums = define(
    "edge_sums(Tensor[] chunks, int num_rows, Tensor? edge_ids, Tensor values, int[] chunk_ranges) -> Tensor", None
)
define("launch_kernel(str kernel, int blocks, Tensor[] inputs, Tensor(a!)[] outputs, Tensor tiling) -> ()", None)


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
    """Launch a kernel on an NPU's tensors, on the current stream; the contents of outputs are replaced."""
    words = torch.from_numpy(tiling.view(np.int32)).to(outputs[0].device)
    torch.ops.lightning_gnn.launch_kernel(kernel, max(blocks, 1), inputs, outputs, words)

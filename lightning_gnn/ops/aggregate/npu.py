"""Binding of the Ascend C kernels on an NPU, built on first use; ``ascend_ops/host/ops.cpp`` registers operators."""

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
    "edge_products(Tensor[] chunks, Tensor row_side, Tensor column_side, int[] chunk_ranges) -> Tensor", None
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
    """Return whether the NPU kernels are available; the first call builds and loads them, or warns if that fails."""
    from lightning_gnn.ascend_ops import binding

    try:
        binding.load()
    except binding.BindingError as error:
        warnings.warn(f"{error}\nWithout the kernels, torch's own operators aggregate, more slowly.", stacklevel=2)
        return False
    return True


@cache
def num_cores(index: int) -> int:
    """Return the number of AI cores of an NPU, the workers of a plan (without kernels: torch's threads)."""
    if not available():
        return torch.get_num_threads()
    count = ctypes.c_int64(0)
    runtime = ctypes.CDLL("libascendcl.so")
    ai_core_num = 0  # ACL_DEVICE_INFO_AI_CORE_NUM
    if runtime.aclGetDeviceCapability(ctypes.c_uint32(index), ai_core_num, ctypes.byref(count)) or count.value < 1:
        raise RuntimeError(f"CANN did not report the number of cores of NPU {index}; set PlanSettings(num_workers=…)")
    return count.value


def launch(kernel: str, blocks: int, inputs: list[Tensor], outputs: list[Tensor], tiling: Any) -> None:
    """Launch a kernel on NPU tensors on the current stream; it overwrites the outputs."""
    words = torch.from_numpy(tiling.view(np.int32)).to(outputs[0].device)
    torch.ops.lightning_gnn.launch_kernel(kernel, max(blocks, 1), inputs, outputs, words)

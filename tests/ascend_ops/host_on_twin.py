"""Builds the NPU binding against stubs of CANN and torch_npu, runs its operators on the twin, and prints JSON.

Runs in its own process, because it registers kernels for torch's PrivateUse1.
"""

import contextlib
import ctypes
import io
import json
import threading
import traceback
import warnings
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch

from lightning_gnn.ascend_ops import binding
from lightning_gnn.ascend_ops.twin import default_twin
from lightning_gnn.compressed import CompressedGraph
from lightning_gnn.compressed import builder as build
from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.ops import aggregate, edge_softmax
from lightning_gnn.ops.aggregate import ascend_twin as aggregate_ascend_twin
from lightning_gnn.ops.aggregate import chip, derivatives
from lightning_gnn.ops.aggregate import npu as aggregate_npu
from lightning_gnn.ops.aggregate_update.ascend import Chip
from lightning_gnn.ops.aggregate_update.reference import Update
from lightning_gnn.ops.gather import npu as gather_npu

NAMES = (
    "aggregate_chunks",
    "aggregate_vector",
    "edge_products",
    "edge_softmax",
    "edge_softmax_backward",
    "edge_sums",
)
KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
CALLS = []
STREAMS = []
"""Thread and stream of each launch."""

LIBC = ctypes.CDLL(None)
LIBC.malloc_usable_size.restype = ctypes.c_size_t
LIBC.malloc_usable_size.argtypes = [ctypes.c_void_p]


@ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint32,
    ctypes.c_uint32,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
def launch_on_twin(name, blocks, count, pointers, stream):
    """Launch on the twin. Arguments have the size of their allocation: the binding passes whole allocations."""
    try:
        sizes = [LIBC.malloc_usable_size(pointers[i]) for i in range(count)]
        arrays = [(ctypes.c_uint8 * sizes[i]).from_address(pointers[i]) for i in range(count)]
        default_twin().launch(name.decode(), [np.ctypeslib.as_array(array) for array in arrays], blocks)
        CALLS.append(name.decode())
        STREAMS.append((threading.get_ident(), stream or 0))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def get_npu_operator(name):
    """Return the operator that the dispatcher selects for NPU tensors, to be called with CPU tensors."""
    overload = getattr(torch.ops.lightning_gnn, name).default
    return lambda *args: overload.redispatch(KEYS, *args)


def compute_results(functions, seed, heads, columns, dtype, reduce):
    """Run attention and aggregations, forward and backward, on a graph with a split hub and parallel edges."""
    torch.manual_seed(seed)
    nodes, edges = 90, 1200
    edge_index = torch.randint(0, nodes - 4, (2, edges))
    edge_index[1, : edges // 4] = 3
    settings = PlanSettings(num_workers=6, num_groups=2 if heads * columns >= 32 else 1)
    graph = CompressedGraph.from_edge_index(edge_index, nodes, settings=settings)
    x = torch.randn(nodes, heads, columns, dtype=dtype, requires_grad=True)
    source, target = (torch.randn(nodes, heads, dtype=dtype, requires_grad=True) for _ in range(2))
    weight = torch.rand(edges, heads, dtype=dtype, requires_grad=True)
    executor = chip.Chip(functions, 6)
    with patch.object(build, "MAX_VERTICES", 64), patch.object(derivatives, "functions_of", lambda *_: executor):
        attention = edge_softmax(graph, source, target)
        out = aggregate(graph, x, weight, reduce)
        plain = aggregate(graph, x, None, reduce)
        chunks, last = graph.chunked().chunks.tensors(), graph.chunked().chunks.num_chunks
        vector = [
            functions.aggregate_vector(chunks, nodes, x.detach(), given, reduce, [0, 16, heads * columns], [0, 1, last])
            for given in (weight.detach(), None)
        ]
        vector = [out[0] for out in vector]
        outputs, inputs = [attention, out, plain], [x, weight, source, target]
        small = 1e-4 if dtype == torch.float16 else 1e-9  # below float16's range, but not that of its dtype
        return [
            *vector,
            *outputs,
            *torch.autograd.grad(outputs, inputs, [torch.randn_like(output) * small for output in outputs]),
        ]


def compare(case):
    """Name the results in which the binding and the twin's Python backend, which launch the same kernels, differ."""
    left = compute_results(SimpleNamespace(**{name: get_npu_operator(name) for name in NAMES}), *case)
    right = compute_results(aggregate_ascend_twin, *case)
    tolerance = 2e-3 if case[3] == torch.float16 else 1e-5  # both round once more, after divisions in a different order
    found = []
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        largest = b.abs().max().item()
        if not largest > 0 or not torch.allclose(a, b, rtol=tolerance, atol=tolerance * largest * 1e-3):
            found.append(f"{case}: result {place}")
    return found


def run_mini_batch(launch):
    """Run a layer, its gradient and a gather of rows with kernels launched by ``launch``."""
    torch.manual_seed(0)
    chip, found = Chip(launch, 3), []
    x, weight, own = torch.randn(300, 40), torch.randn(150, 40), torch.randn(150, 40)
    edge_index = torch.stack([torch.randint(300, (900,)), torch.randint(200, (900,))])
    edges = torch.ops.lightning_gnn.edges_by_target(edge_index, 300, 200, torch.rand(900))
    call = Update(edges, x, weight[None], own[None], torch.ones(1, 150), [200], [1], [0], True, True)
    out, saved = chip.update(call, True)
    found += [out, *chip.backward(call, torch.ones_like(out), saved, None, [True] * 4)]
    executor = SimpleNamespace(launch=launch), 3
    with patch.object(gather_npu, "chip_executor", lambda *_: executor):
        rows = torch.empty(4, 40)
        gather_npu.gather_npu(gather_npu.Gather(x, torch.tensor([5, 299, 0, 7]), rows))
    best, ties = chip.maxima(edges[:2], x)
    found += [best, ties, chip.maxima_backward(edges[:2], torch.ones_like(best), best, x)]
    return [*found, rows, x[[5, 299, 0, 7]] - rows]


def launch_on_npu(*arguments):
    with patch.object(torch.ops.lightning_gnn, "launch_kernel", get_npu_operator("launch_kernel")):
        aggregate_npu.launch(*arguments)


def aggregate_on_streams(library):
    """Aggregate with the same weights, twice, in two threads with their own streams; name the errors."""
    torch.manual_seed(0)
    graph = CompressedGraph.from_edge_index(torch.randint(0, 60, (2, 700)), 60, settings=PlanSettings(num_workers=2))
    chunks, x, weight = graph.chunked().chunks, torch.randn(60, 1, 40), torch.rand(700, 1)
    cut, last, chunks = [0, 40], chunks.num_chunks, chunks.tensors()
    exact = aggregate(graph, x, weight, backend="reference")
    found, begun = [], threading.Barrier(2)

    def work(stream):
        library.set_stream(ctypes.c_void_p(stream))
        begun.wait()
        for _ in range(2):
            cubes = get_npu_operator("aggregate_chunks")(chunks, 60, x, weight, "sum", cut, [0, last])[0]
            if not torch.allclose(cubes, exact, rtol=0.01, atol=0.02):
                found.append(f"stream {stream}: another result")
        used = {stream for thread, stream in STREAMS if thread == threading.get_ident()}
        if used != {stream}:
            found.append(f"stream {stream}: launched on {used}")

    threads = [threading.Thread(target=work, args=(stream,)) for stream in (16, 32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main():
    said = []
    for _ in range(2):
        with contextlib.redirect_stderr(io.StringIO()) as lines:
            library = binding.load()
        said.append(lines.getvalue())
    ctypes.CDLL(str(library)).set_launcher(launch_on_twin)
    differences = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for case in [
            (0, 2, 24, torch.float32, "sum"),
            (1, 1, 41, torch.float32, "mean"),
            (2, 3, 16, torch.float16, "sum"),
            (3, 1, 16, torch.float16, "mean"),
            (4, 1, 300, torch.float64, "sum"),
        ]:
            differences += compare(case)
        pairs = zip(run_mini_batch(launch_on_npu), run_mini_batch(aggregate_ascend_twin.launch), strict=True)
        differences += [f"mini-batch: result {place}" for place, pair in enumerate(pairs) if not torch.equal(*pair)]
    empty = [
        torch.zeros(n, dtype=torch.int32 if i in (0, 3, 4) else torch.int64) for i, n in enumerate((0, 1, 1, 0, 0, 1))
    ]
    zeros = get_npu_operator("aggregate_chunks")(empty, 3, torch.ones(3, 1, 5), None, "sum", [0, 5], [0, 0])[0]
    refusals = []
    edge = [torch.tensor(part, dtype=empty[i].dtype) for i, part in enumerate(([0], [0, 1], [0, 1], [0], [0], [0, 1]))]
    for arguments in [
        (edge, 3, torch.ones(3, 2, 5), None, "sum", [0, 10], [0, 1]),
        (empty, 3, torch.ones(3, 1, 5), None, "max", [0, 5], [0, 0]),
        (
            [*empty[:3], torch.zeros(1, dtype=torch.int32), *empty[4:]],
            3,
            torch.ones(3, 1, 5),
            None,
            "sum",
            [0, 5],
            [0, 9],
        ),
    ]:
        try:
            get_npu_operator("aggregate_chunks")(*arguments)
        except (NotImplementedError, ValueError) as error:
            refusals.append(f"{type(error).__name__}: {error}".splitlines()[0])
    for kernel in ("scatter_rows", "update"):
        try:
            get_npu_operator("launch_kernel")(kernel, 1, [torch.ones(1)], [torch.ones(1)], torch.ones(1))
        except ValueError as error:
            refusals.append(f"{type(error).__name__}: {error}".splitlines()[0])
    found = {
        "library": str(library),
        "said": said,
        "differences": differences,
        "kernels": sorted(set(CALLS)),
        "empty": zeros.shape == (3, 1, 5) and not zeros.any().item(),
        "refusals": refusals,
        "streams": aggregate_on_streams(ctypes.CDLL(str(library))),
        "warnings": [str(item.message) for item in caught if "NPU kernels" in str(item.message)],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""``lgnn doctor --kernels``: compare the Ascend C kernels (NPU or simulated) with torch's operators in float64."""

import math
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn.ascend_ops import binding

HALF = 2.0**-11  # unit roundoff of float16


@dataclass(frozen=True)
class Check:
    """Result of checking one operator, forward and backward."""

    name: str
    error: float = float("nan")  # the largest difference from float64, relative to the largest value
    bound: float = 4 * HALF  # the largest error that rounding explains
    seconds: float = float("nan")  # seconds of the second call on an NPU, forward and backward; NaN if simulated
    problem: str = ""  # the exception that the operator raised; empty without one

    @property
    def is_right(self) -> bool:
        """Whether the operator returned a result within the rounding bound."""
        return not self.problem and self.error <= self.bound

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name}: failed: {self.problem}"
        verdict = "right" if self.is_right else "WRONG"
        time = "" if math.isnan(self.seconds) else f", {self.seconds * 1e3:.2f} ms"
        return f"{self.name}: {verdict}, error {self.error:.1e} of at most {self.bound:.1e}{time}"


def select_device() -> tuple[str, str]:
    """Return device and backend to check, the NPU or else the kernels' CPU twin; raise a BindingError without both."""
    problems = binding.missing()
    if not problems and hasattr(torch, "npu"):
        return "npu", "device"
    if shutil.which("g++") is None:
        raise binding.BindingError(
            f"the Ascend C kernels cannot be checked: for an NPU, get {'; '.join(problems)}; to simulate them, "
            "get a C++ compiler (apt install g++)"
        )
    return "cpu", "ascend_twin"


def check_kernels(device: str, backend: str) -> list[Check]:
    """Run each operator on a small graph and compare it with torch's own in float64 on the CPU."""
    from lightning_gnn.compressed import CompressedGraph
    from lightning_gnn.ops import aggregate, aggregate_update, edge_softmax
    from lightning_gnn.ops.gather.npu import gather_npu
    from lightning_gnn.ops.gather.reference import Gather

    if device == "npu":
        binding.load()
    generator = torch.Generator().manual_seed(0)
    nodes, edges = 500, 4000
    edge_index = (nodes * torch.rand(2, edges, generator=generator) ** 2).long()
    edge_index[1, :600] = nodes // 2  # a node of high degree
    graph = CompressedGraph.from_edge_index(edge_index, nodes)
    x, y = torch.randn(nodes, 72, generator=generator), torch.randn(nodes, 1, generator=generator)
    weight = torch.rand(edges, generator=generator)
    first, second = (torch.randn(40, 72, generator=generator) / 8 for _ in range(2))
    device_graph, device_edges = graph.to(device), edge_index.to(device)

    # The exact result in float64 is computed on the CPU.
    def graph_of(x: Tensor) -> CompressedGraph:
        return graph if x.dtype == torch.float64 else device_graph

    def update(x: Tensor, weight: Tensor, own: Tensor) -> Tensor:
        edges = edge_index if x.dtype == torch.float64 else device_edges
        return aggregate_update(x, edges, weight, own, reduce="mean")

    def gather(x: Tensor) -> Tensor:
        index = edge_index[0].to(x.device)
        if x.dtype == torch.float64:
            return x[index]
        out = x.new_empty(index.numel(), x.size(1))
        gather_npu(Gather(x.detach(), index, out))
        return out

    return [
        _check("aggregate", lambda x, w: aggregate(graph_of(x), x, w), [x, weight], device, backend),
        _check("aggregate (max)", lambda x: aggregate(graph_of(x), x, None, "max"), [x], device, backend),
        _check("edge_softmax", lambda a, b: edge_softmax(graph_of(a), a, b), [y, y.flip(0)], device, backend),
        _check("aggregate_update", update, [x, first, second], device, backend),
        _check("gather_rows", gather, [x], device, backend, differentiable=False),
    ]


def report(device: str, checks: list[Check]) -> list[str]:
    """Format the results for an issue: versions, chip and one line per operator."""
    from lightning_gnn.cli.versions import version_of, versions

    releases = {**versions(), "torch_npu": version_of("torch-npu") or "missing"}
    chip = "the twin: simulated on this CPU"
    if device == "npu":
        from lightning_gnn.ops.aggregate.npu import num_cores

        cores = num_cores(int(torch.get_device_module("npu").current_device()))
        chip = f"{binding.soc_version()}, {cores} AI cores"
    wrong = [check.name for check in checks if not check.is_right]
    return [
        ", ".join(f"{name} {release}" for name, release in releases.items()),
        f"Ascend C kernels on {chip}:",
        *(f"  {check}" for check in checks),
        f"{len(wrong)} of {len(checks)} are wrong: {', '.join(wrong)}" if wrong else f"all {len(checks)} are right",
    ]


def _check(
    name: str,
    call: Callable[..., Tensor],
    tensors: list[Tensor],
    device: str,
    backend: str,
    differentiable: bool = True,
) -> Check:
    from lightning_gnn.ops import default_backend

    def run(inputs: list[Tensor]) -> list[Tensor]:
        inputs = [tensor.requires_grad_(differentiable) for tensor in inputs]
        out = call(*inputs)
        if not differentiable:
            return [out]
        grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).to(out.device)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    with default_backend("reference"):
        exact = run([tensor.double() for tensor in tensors])
    try:
        with warnings.catch_warnings(), default_backend(None if backend == "device" else backend):
            warnings.simplefilter("ignore")
            for _ in range(2):  # the first call compiles and plans
                begin = time.perf_counter()
                results = [tensor.cpu() for tensor in run([tensor.to(device, copy=True) for tensor in tensors])]
                seconds = time.perf_counter() - begin if backend == "device" else float("nan")
    except Exception as error:
        return Check(name, problem=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
    errors = [(a.double() - b).abs().max() / b.abs().max() for a, b in zip(results, exact, strict=True)]
    return Check(name, float(torch.stack(errors).max()), seconds=seconds)

"""Ascend C kernels against torch's own operators in float64, on an NPU or on their twin: ``lgnn doctor --kernels``."""

import math
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn.ascend_ops import binding

HALF = 2.0**-11  # rounding to float16, relative


@dataclass(frozen=True)
class Check:
    """One operator, forward and backward."""

    name: str
    error: float = float("nan")  # the largest difference from float64, relative to the largest number
    bound: float = 4 * HALF  # what rounding explains of it
    seconds: float = float("nan")
    """Of a call after the first on an NPU, forward and backward; simulated seconds would mislead."""
    problem: str = ""  # what went wrong in place of a result; empty where nothing did

    @property
    def right(self) -> bool:
        """Whether there is a result, and rounding explains its difference."""
        return not self.problem and self.error <= self.bound

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name}: failed: {self.problem}"
        verdict = "right" if self.right else "WRONG"
        taken = "" if math.isnan(self.seconds) else f", {self.seconds * 1e3:.2f} ms"
        return f"{self.name}: {verdict}, error {self.error:.1e} of at most {self.bound:.1e}{taken}"


def place() -> tuple[str, str]:
    """Return the device on which kernels are checked, and the backend.

    An NPU for which they can be built comes first; else their twin, which needs a C++ compiler.
    """
    problems = binding.missing()
    if not problems and hasattr(torch, "npu"):
        return "npu", "device"
    if shutil.which("g++") is None:
        raise binding.BindingError(
            f"the Ascend C kernels cannot be checked: for an NPU, get {'; '.join(problems)}; to simulate them, "
            "a C++ compiler (apt install g++)"
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
    draw = torch.Generator().manual_seed(0)
    nodes, edges = 500, 4000
    edge_index = (nodes * torch.rand(2, edges, generator=draw) ** 2).long()
    edge_index[1, :600] = nodes // 2  # a vertex with many edges
    graph = CompressedGraph.from_edge_index(edge_index, nodes)
    x, y = torch.randn(nodes, 72, generator=draw), torch.randn(nodes, 1, generator=draw)
    weight = torch.rand(edges, generator=draw)
    first, second = (torch.randn(40, 72, generator=draw) / 8 for _ in range(2))
    there, edges_there = graph.to(device), edge_index.to(device)

    def on(of: Tensor) -> CompressedGraph:
        return graph if of.dtype == torch.float64 else there

    def layer(x: Tensor, weight: Tensor, own: Tensor) -> Tensor:
        places = edge_index if x.dtype == torch.float64 else edges_there
        return aggregate_update(x, places, weight, own, reduce="mean")

    def gathered(x: Tensor) -> Tensor:
        index = edge_index[0].to(x.device)
        if x.dtype == torch.float64:
            return x[index]
        out = x.new_empty(index.numel(), x.size(1))
        gather_npu(Gather(x.detach(), index, out))
        return out

    return [
        _check("aggregate", lambda x, w: aggregate(on(x), x, w), [x, weight], device, backend),
        _check("aggregate (max)", lambda x: aggregate(on(x), x, None, "max"), [x], device, backend),
        _check("edge_softmax", lambda a, b: edge_softmax(on(a), a, b), [y, y.flip(0)], device, backend),
        _check("aggregate_update", layer, [x, first, second], device, backend),
        _check("gather_rows", gathered, [x], device, backend, differentiable=False),
    ]


def report(device: str, checks: list[Check]) -> list[str]:
    """Return the result in a few lines that fit an issue: versions, chip, and each operator."""
    from lightning_gnn.cli.versions import version_of, versions

    known = {**versions(), "torch_npu": version_of("torch-npu") or "missing"}
    where = "the twin: simulated on this CPU"
    if device == "npu":
        from lightning_gnn.ops.aggregate.npu import num_cores

        cores = num_cores(int(torch.get_device_module("npu").current_device()))
        where = f"{binding.soc_version()}, {cores} AI cores"
    wrong = [check.name for check in checks if not check.right]
    return [
        ", ".join(f"{name} {release}" for name, release in known.items()),
        f"Ascend C kernels on {where}:",
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
            for _ in range(2):  # the first one builds and plans
                begin = time.perf_counter()
                found = [tensor.cpu() for tensor in run([tensor.to(device, copy=True) for tensor in tensors])]
                seconds = time.perf_counter() - begin if backend == "device" else float("nan")
    except Exception as error:
        return Check(name, problem=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
    errors = [(a.double() - b).abs().max() / b.abs().max() for a, b in zip(found, exact, strict=True)]
    return Check(name, float(torch.stack(errors).max()), seconds=seconds)

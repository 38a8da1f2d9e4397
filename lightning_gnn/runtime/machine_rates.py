"""Rates of this machine: timing short work, and results that are measured once for each machine."""

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_gnn.runtime.devices import is_busy, num_cores
from lightning_gnn.runtime.files import read_json, read_text
from lightning_gnn.runtime.store import checksum, find, get_or_create

_REPEATS = 3
_WIDTH = 256  # inputs and outputs of a matrix product such as a layer's


def min_seconds(work: Callable[[], object]) -> float:
    """Return the minimum seconds of a few calls after a warm-up call; ``work`` must synchronize its device."""
    work()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def product_rate(dtype: torch.dtype, rows: int = 1024) -> float:
    """Measure the operations per second of a layer's matrix product with the current torch threads; takes some ms."""
    left, right = torch.ones(rows, _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    out = torch.empty(rows, _WIDTH, dtype=dtype)
    return 2 * rows * _WIDTH * _WIDTH / min_seconds(lambda: torch.mm(left, right, out=out))


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Compute with a number of torch threads in the ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measured_once(title: str, measure: Callable[[], Mapping[str, Any]], *conditions: object) -> dict[str, Any]:
    """Return the cached rates of this machine under conditions, or measure them; not cached on a busy machine.

    Args:
        title: Name of the rates for the user.
        measure: Returns rates by name, as numbers or mappings of numbers.
        conditions: What the rates depend on besides the machine, such as a number of threads.
    """
    key = checksum(title, _describe_machine(), torch.__version__, *conditions)
    if is_busy():
        return find("limits", key, _read) or dict(measure())
    measured: list[dict[str, Any]] = []

    def make(folder: Path) -> None:
        measured.append(dict(measure()))
        (folder / "limits.json").write_text(json.dumps(measured[0]))

    found = get_or_create("limits", key, make, _read, title=title)
    return found or (measured[0] if measured else dict(measure()))


def _read(folder: Path) -> dict[str, Any]:
    return dict(read_json(read_text(folder / "limits.json")))


def _describe_machine() -> str:
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{platform.node()} {model} {num_cores()} {torch.backends.cpu.get_cpu_capability()}"

"""What this machine can do at the most: copies, random reads and dense products, measured once and kept."""

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lightning_gnn.ops.gather.definition import gather_rows
from lightning_gnn.runtime.cores import is_busy, num_cores
from lightning_gnn.runtime.files import read_json, read_text
from lightning_gnn.runtime.store import checksum, find, kept

_BYTES = 1 << 27  # of what is copied and read: more than caches hold
_ROW_BYTES = 512
_ROWS, _WIDTH = 10_240, 256  # rows of a product such as a layer's, and its inputs and outputs
_REPEATS = 3


@dataclass(frozen=True)
class MachineLimits:
    """What some threads of this machine reach in loops that do nothing else.

    Args:
        threads: How many of torch's threads; reads are those of one thread.
        copy_bandwidth: Bytes read and written per second by a copy that no cache holds.
        gather_bandwidth: Bytes per second of rows of 512 bytes read in random order and written in order.
        random_read_s: Seconds of one of many independent reads of 8 bytes in random order.
        flops: Operations per second of a float32 product of 10240 x 256 by 256 x 256; a multiply-add is two.
        flops_bf16: The same in bfloat16.
    """

    threads: int
    copy_bandwidth: float
    gather_bandwidth: float
    random_read_s: float
    flops: float
    flops_bf16: float


def machine_limits(threads: int | None = None) -> MachineLimits:
    """Return the limits, as they are kept for this machine, or else measured in about a second.

    What is measured while others keep the machine busy is not kept.

    Args:
        threads: Of torch; by default as many as it uses now.
    """
    number = torch.get_num_threads() if threads is None else threads
    key = checksum("limits", _machine(), torch.__version__, number)
    if is_busy():
        return find("limits", key, _read) or measure_limits(number)
    measured: list[MachineLimits] = []

    def make(folder: Path) -> None:
        measured.append(measure_limits(number))
        (folder / "limits.json").write_text(json.dumps(asdict(measured[0])))

    found = kept("limits", key, make, _read, title=f"{number} threads of this machine")
    return found or (measured[0] if measured else measure_limits(number))


def _read(folder: Path) -> MachineLimits:
    return MachineLimits(**read_json(read_text(folder / "limits.json")))


def measure_limits(threads: int) -> MachineLimits:
    """Measure the limits, the best of a few times each."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        source, target = torch.ones(_BYTES // 4), torch.empty(_BYTES // 4)
        copied = 2 * _BYTES / _least(lambda: target.copy_(source))
        flops, flops_bf16 = (product_rate(dtype, _ROWS) for dtype in (torch.float32, torch.bfloat16))
        torch.set_num_threads(1)
        table, rows = source.view(-1, _ROW_BYTES // 4), _BYTES // _ROW_BYTES
        ids = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
        gathered = _BYTES / _least(lambda: gather_rows(table, ids))
        words = source.view(torch.int64)
        places = torch.randint(words.numel(), (1 << 20,), generator=torch.Generator().manual_seed(0))
        read = _least(lambda: words.index_select(0, places)) / places.numel()
    finally:
        torch.set_num_threads(before)
    return MachineLimits(threads, copied, gathered, read, flops, flops_bf16)


def product_rate(dtype: torch.dtype, rows: int = 1024) -> float:
    """Return the operations per second of a product such as a layer's, with torch's threads of now; some ms."""
    wide = narrow = _WIDTH
    left, right = torch.ones(rows, wide, dtype=dtype), torch.ones(wide, narrow, dtype=dtype)
    out = torch.empty(rows, narrow, dtype=dtype)
    return 2 * rows * wide * narrow / _least(lambda: torch.mm(left, right, out=out))


def _least(work: Callable[[], object]) -> float:
    """Return the least seconds of a few times, after one that does not count."""
    work()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _machine() -> str:
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{platform.node()} {model} {num_cores()} {torch.backends.cpu.get_cpu_capability()}"

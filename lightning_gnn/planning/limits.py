"""Peak rates of this machine for copies, random reads and matrix products, measured once and cached."""

from dataclasses import asdict, dataclass

import torch

from lightning_gnn.ops.gather.definition import gather_rows
from lightning_gnn.runtime.machine_rates import measured_once, min_seconds, product_rate, torch_threads

_ARRAY_BYTES = 1 << 27  # size of the copied and read arrays: larger than CPU caches
_ROW_BYTES = 512
_ROWS = 10_240  # rows of a matrix product such as a layer's


@dataclass(frozen=True)
class MachineLimits:
    """Rates that a number of threads reach in microbenchmarks.

    Args:
        threads: Number of torch threads; reads are measured with one thread.
        copy_bandwidth: Bytes read and written per second by a copy larger than the caches.
        gather_bandwidth: Bytes per second of rows of 512 bytes read in random order and written in order.
        random_read_s: Seconds per independent random read of 8 bytes.
        flops: Operations per second of a float32 product of 10240 x 256 by 256 x 256; a multiply-add counts as two.
        flops_bf16: Operations per second of the same product in bfloat16.
    """

    threads: int
    copy_bandwidth: float
    gather_bandwidth: float
    random_read_s: float
    flops: float
    flops_bf16: float


def machine_limits(threads: int | None = None) -> MachineLimits:
    """Return the cached limits of this machine, or measure them in about a second; not cached on a busy machine.

    ``threads`` is the number of torch threads, by default the current one.
    """
    number = torch.get_num_threads() if threads is None else threads
    found = measured_once(f"{number} threads of this machine", lambda: asdict(measure_limits(number)))
    assert found is not None
    return MachineLimits(**found)


def measure_limits(threads: int) -> MachineLimits:
    """Measure the limits, each as the best of a few repetitions."""
    with torch_threads(threads):
        source, target = torch.ones(_ARRAY_BYTES // 4), torch.empty(_ARRAY_BYTES // 4)
        copied = 2 * _ARRAY_BYTES / min_seconds(lambda: target.copy_(source))
        flops, flops_bf16 = (product_rate(dtype, _ROWS) for dtype in (torch.float32, torch.bfloat16))
    with torch_threads(1):
        table, rows = source.view(-1, _ROW_BYTES // 4), _ARRAY_BYTES // _ROW_BYTES
        ids = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
        gathered = _ARRAY_BYTES / min_seconds(lambda: gather_rows(table, ids))
        words = source.view(torch.int64)
        indices = torch.randint(words.numel(), (1 << 20,), generator=torch.Generator().manual_seed(0))
        read = min_seconds(lambda: words.index_select(0, indices)) / indices.numel()
    return MachineLimits(threads, copied, gathered, read, flops, flops_bf16)

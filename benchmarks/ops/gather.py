"""Gathering feature rows on the CPU: ours against torch, a plain copy, and plain C loops that show the machine's limit.

The figure is milliseconds per mini-batch of random rows of 400 bytes. Every contestant reads the same table and writes
the same output, in one process. The C loops copy or write around the caches, with prefetch distances of 0 to 32 rows
into all caches or around them, on one and two threads, from tables in small and in huge pages; the best one is the
limit. Sorted rows are read too.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import compare, machine, measure, parse, publish
from lightning_gnn.features.arrays import advise
from lightning_gnn.ops import gather_rows
from lightning_gnn.ops.aggregate.numba_rows import use_huge_pages

SIZES = {"nodes": (1_000_000, 20_000), "rows": (447_000, 4_000), "features": (100, 100)}
AHEAD = (0, 4, 8, 16, 32)
SOURCE = r"""
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#define LOOP(name, hint, copy) void name(const char *table, const int64_t *index, char *out, long begin, long end, \
                                         long count, long bytes, long ahead) { \
    for (long i = begin; i < end; i++) { \
        if (ahead && i + ahead < count) \
            for (long j = 0; j < bytes; j += 64) _mm_prefetch(table + index[i + ahead] * bytes + j, hint); \
        const char *from = table + index[i] * bytes; char *to = out + i * bytes; copy } \
    _mm_sfence(); }
#define STREAM long j = 0; \
    if ((uintptr_t)to & 16) { _mm_stream_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)from)); j = 16; } \
    for (; j + 32 <= bytes; j += 32) \
        _mm256_stream_si256((__m256i *)(to + j), _mm256_loadu_si256((const __m256i *)(from + j))); \
    if (j < bytes) _mm_stream_si128((__m128i *)(to + j), _mm_loadu_si128((const __m128i *)(from + j)));
LOOP(copy_t0, _MM_HINT_T0, memcpy(to, from, bytes);)
LOOP(stream_t0, _MM_HINT_T0, STREAM)
LOOP(stream_nta, _MM_HINT_NTA, STREAM)
"""
"""Loops over rows of a multiple of 16 bytes, for x86 with AVX."""
LOOPS = {"copy": "copy_t0", "stream": "stream_t0", "stream, prefetch once": "stream_nta"}


def build(folder: Path) -> ctypes.CDLL | None:
    """Compile the loops; None without a C compiler for x86."""
    (folder / "loops.c").write_text(SOURCE)
    command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "loops.c", "-o", "loops.so"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return ctypes.CDLL(str(folder / "loops.so"))


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def run_c(function: Any, ahead: int, pool: ThreadPoolExecutor, threads: int, table: Tensor, index: Tensor,
          out: Tensor) -> None:  # fmt: skip
    """Run a C loop on one part of the rows per thread."""
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (table, index, out)]
    count, bytes_ = index.numel(), out[0].nbytes

    def part(number: int) -> None:
        ends = [count * number // threads, count * (number + 1) // threads, count, bytes_, ahead]
        function(*pointers, *map(ctypes.c_long, ends))

    list(pool.map(part, range(threads)))


def contestants(sizes: dict[str, int], loops: ctypes.CDLL | None) -> dict[str, Callable[[], float] | None]:
    """Return every contestant; loops are None without a compiler."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(sizes["nodes"], (sizes["rows"],), generator=generator)
    ordered = index.sort().values
    small = torch.empty(sizes["nodes"], sizes["features"])
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        advise(small, "MADV_NOHUGEPAGE")
    small.uniform_(generator=generator)
    tables = {"small pages": small, "huge pages": use_huge_pages(torch.empty_like(small)).copy_(small)}
    out = use_huge_pages(torch.empty(sizes["rows"], sizes["features"])).zero_()
    pools = {threads: ThreadPoolExecutor(threads) for threads in (1, 2)}

    def worker(table: Tensor, rows: Tensor) -> float:
        return pools[1].submit(timed, partial(gather_rows, table, rows, out)).result()

    def main(function: Callable[[], object], threads: int) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return timed(function)
        finally:
            torch.set_num_threads(before)

    found: dict[str, Callable[[], float] | None] = {}
    for pages, table in tables.items():
        found[f"ours, worker thread, {pages}"] = partial(worker, table, index)
        found[f"ours, worker thread, sorted, {pages}"] = partial(worker, table, ordered)
        for threads in (1, 2):
            label = f"{threads} threads, {pages}"
            found[f"ours, {label}"] = partial(main, partial(gather_rows, table, index, out), threads)
            select = partial(torch.index_select, table, 0, index)
            found[f"index_select, {label}"] = partial(main, partial(select, out=out), threads)
            found[f"index_select into new memory, {label}"] = partial(main, select, threads)
            for name, function in LOOPS.items():
                for ahead in AHEAD:
                    run = loops and partial(timed, partial(run_c, loops[function], ahead, pools[threads], threads,
                                                           table, index, out))  # fmt: skip
                    found[f"C, {name}, {ahead} ahead, {label}"] = run or None
        best = loops and partial(run_c, loops["stream_nta"], 8, pools[1], 1)
        found[f"C, sorted, {pages}"] = partial(timed, partial(best, table, ordered, out)) if best else None
    count = min(sizes["rows"], sizes["nodes"])
    found["plain copy, 1 threads"] = partial(main, lambda: out[:count].copy_(small[:count]), 1)
    found["plain copy, 2 threads"] = partial(main, lambda: out[:count].copy_(small[:count]), 2)
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("gather", __doc__, SIZES, argv)
    described = machine()
    with tempfile.TemporaryDirectory() as folder:
        every = contestants(args.sizes, build(Path(folder)))
        rows = measure({name: run for name, run in every.items() if args.only in name}, args.runs)
    comparisons = []
    for pages in ("small pages", "huge pages"):
        for threads in (1, 2):
            end = f"{threads} threads, {pages}"
            limit = [name for name in every if name.startswith("C, ") and name.endswith(end)]
            ours, what = [f"ours, {end}"], f"Gathering rows, {threads} threads, {pages}"
            comparisons.append(compare(rows, f"{what}, against the best C loop", ours, limit, False, 0.8))
            comparisons.append(
                compare(rows, f"{what}, against torch.index_select", ours, [f"index_select, {end}"], False)
            )
    result = {
        "benchmark": "gather",
        "title": f"Gathering {args.rows:,} of {args.nodes:,} rows of {args.features} float32",
        "unit": "ms per mini-batch",
        "settings": {**args.sizes, "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": comparisons,
    }
    return publish(result, args.out)


if __name__ == "__main__":
    main()

"""The most important figures of a GPU in a few minutes: samples, host memory, mini-batches and training steps.

One graph of the size of ogbn-products, 1,024 seeds, fanouts 15, 10 and 5; contestants run in turns, round by round.
Samples are first compared with the CPU's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.device_clock import failure
from benchmarks.gpu import shards
from benchmarks.gpu.contestants import First

PARTS = {"samples": "us", "places": "us", "loaders": "ms", "steps": "ms", "shards": "ms"}
"""The parts in order of measurement, with the unit per mini-batch."""


def run(
    first: First,
    done: Callable[[dict[str, Any]], None],
    ranks: int = 1,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure all parts, passing on the results so far after each."""
    found: dict[str, Any] = {}
    start = time.perf_counter()
    try:
        found["wrong"] = first.check()
    except Exception as error:
        found["wrong"] = failure(error)
    for part in PARTS:
        if part == "shards" and ranks < 2:
            continue
        try:
            found[part] = shards.measure(first, ranks, options) if part == "shards" else first.measure(part)
        except Exception as error:
            found[part] = {"all": {"failed": failure(error)}}
        found["minutes"] = round((time.perf_counter() - start) / 60, 1)
        done(found)
    return found

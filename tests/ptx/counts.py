"""Counts what the compiled kernels do on graphs of the size that makes accesses random.

``python -m tests.ptx.counts`` prints JSON: for each kernel the barriers of its threads, and for each function and array
the values accessed, the requests of warps and the sectors of 32 bytes that these touch.
"""

import json
import random
import re

import torch

from tests.ptx import driver
from tests.ptx.cases import draw_graph, sample, sample_bulk
from tests.ptx.translate import source_of


def count(function):
    """Return the launches of a function: (kernel, statistics, counts by site) each."""
    driver.Settings.count, driver.Settings.launches[:] = True, []
    function()
    driver.Settings.count = False
    return list(driver.Settings.launches)


def array_of(source, kind):
    """Return the array of the first access of a kind in a source line."""
    found = re.search(rf"tl\.{kind}\w*\((?:tl\.load\()?(\w+)", source)
    return found[1] if found else "other"


def summarize(launches):
    """Return barriers and atomics of each kernel, and [values, requests, sectors] of each (function, kind, array)."""
    kernels = {}
    for name, stats, counts, _ in launches:
        row = kernels.setdefault(name, {"barriers": 0, "atomics": 0, "releases": 0, "accesses": {}})
        row.update({key: row[key] + stats[key] for key in ("barriers", "atomics", "releases")})
        for i, what in enumerate(("lanes", "requests", "sectors")):
            for site in {site for site, _ in counts}:
                source = source_of(site.place)
                key = f"{source.partition(':')[0]} {site.kind} {array_of(source, site.kind)}"
                row["accesses"].setdefault(key, [0, 0, 0])[i] += counts[site, what]
    return kernels


def sampled(parts=1, **options):
    """Sample mini-batches of 256 seeds from a graph of 100,000 nodes; return their sizes and the counts."""
    graph = draw_graph(random.Random(1), 100_000, 12)
    kernels = sample.TritonNeighborSampler(graph.indptr, graph.indices, device="cpu", num_programs=8, **options)
    seeds = [torch.randperm(100_000, generator=torch.Generator().manual_seed(i))[:256] for i in range(parts)]
    out = []
    launches = count(lambda: out.extend(sample_bulk(kernels, seeds, [5, 5, 5], list(range(parts)))))
    nodes, edges = ([sum(level) for level in zip(*(own[i] for own in out), strict=True)] for i in (4, 5))
    return {"programs": 8, "parts": parts, "nodes": nodes, "edges": edges, "kernels": summarize(launches)}


def main():
    counts = {"fused": sampled(), "bulk": sampled(4), "queue": sampled(mode="persistent")}
    print(json.dumps(counts, indent=1))


if __name__ == "__main__":
    main()

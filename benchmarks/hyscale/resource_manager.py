"""Ablation of HyScale's resource manager: a simulated node in a closed loop, with one part disabled at a time.

The figure is the training time in excess of that with the best mapping at each moment, in percent of the latter. Every
measured time has a 10 % error (standard deviation), and times lag by the depth of the pipeline.
"""

from __future__ import annotations

import json
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol
from unittest.mock import patch

from benchmarks.harness import machine, parse
from lightning_gnn.hyscale import costs, drm
from lightning_gnn.hyscale.costs import IterationTimes, TaskMapping
from lightning_gnn.hyscale.drm import DynamicResourceManager, PublishedResourceManager
from tests.hyscale.closed_loop import Node

BATCH, LAG, NOISE = 1024, 2, 0.1


class Manager(Protocol):
    """Protocol of resource managers."""

    mapping: TaskMapping

    def observe(self, times: IterationTimes) -> Any:
        """Process the times of an iteration."""


@dataclass(frozen=True)
class Scenario:
    """A node, and its disturbance during a run.

    Args:
        node: Speeds of the node.
        begin: Initial mapping.
        change: Returns the disturbed node of the second third of the run.
        move: Cost of every change of the mapping, relative to the best iteration time.
    """

    node: Node
    begin: TaskMapping
    change: Callable[[Node], Node] | None = None
    move: float = 0.0


def _core_taken(node: Node) -> Node:
    """Another process uses one of four cores, so the CPU's stages take 4/3 of the time."""
    speeds = [speed * 3 / 4 if index < node.cpu_trainers else speed for index, speed in enumerate(node.speeds)]
    return replace(node, speeds=speeds, sampling=node.sampling * 4 / 3, loading=node.loading * 4 / 3)


def _slow_accelerator(node: Node) -> Node:
    return replace(node, speeds=[*node.speeds[:-1], node.speeds[-1] * 0.4])


def _half_pcie(node: Node) -> Node:
    return replace(node, transfer=2 * node.transfer)


_NODE = Node([400, 1000, 1000], sampling=0.8, loading=0.6, reference_threads=4, noise=NOISE)
_GOOD, _BAD = TaskMapping((170, 427, 427), 1, (2, 2, 4)), TaskMapping((700, 200, 124), 1, (1, 1, 6))

SCENARIOS = {
    "nothing changes": Scenario(_NODE, _GOOD),
    "bad first mapping": Scenario(_NODE, _BAD),
    "a core is taken away and given back": Scenario(_NODE, _GOOD, _core_taken),
    "an accelerator is slow for a while": Scenario(_NODE, _GOOD, _slow_accelerator),
    "outliers": Scenario(replace(_NODE, outliers=0.03, warm_up=2), _BAD),
    "large overheads": Scenario(replace(_NODE, overheads=[0.2, 0.02, 0.05]), _BAD),
    "overheads of 1 to 5 ms": Scenario(
        replace(_NODE, speeds=[10e3, 25e3, 25e3], sampling=0.032, loading=0.024, overheads=[0.005, 0.001, 0.003]), _BAD
    ),
    "a move costs half an iteration": Scenario(_NODE, _BAD, move=0.5),
    "near the best, a move costs half an iteration": Scenario(_NODE, _GOOD, move=0.5),
    "every 20th measurement is three times as long": Scenario(replace(_NODE, outliers=0.05, outlier=3.0), _GOOD),
    "no noise": Scenario(replace(_NODE, noise=0.0), _BAD),
    "the CPU trainer slows the others down": Scenario(
        replace(_NODE, speeds=[150, 1000, 1000], sampling=0.3, loading=0.3, drag=1.3),
        TaskMapping((71, 476, 477), 1, (2, 2, 4)),
    ),
    "the CPU trainer is too slow": Scenario(
        replace(_NODE, speeds=[1000, 1000, 1000], overheads=[1.0, 0.05, 0.05]),
        TaskMapping((341, 341, 342), 1, (2, 2, 4)),
    ),
    "sampling on accelerators too": Scenario(
        replace(_NODE, sampling=3.0, sampling_there=0.8), TaskMapping((170, 427, 427), 1, (2, 2, 4), 0.05)
    ),
    "slow link": Scenario(replace(_NODE, transfer=1 / 900), TaskMapping((170, 427, 427), 1, (2, 2, 4))),
    "PCIe is halved for a while": Scenario(
        replace(_NODE, transfer=1 / 1800), TaskMapping((170, 427, 427), 1, (2, 2, 4)), _half_pcie
    ),
    "two CPU trainers": Scenario(
        replace(_NODE, speeds=[600, 200, 1000], cpu_trainers=2), TaskMapping((300, 300, 424), 2, (2, 2, 4))
    ),
    "few cores": Scenario(
        replace(_NODE, reference_threads=1, sampling=0.3, loading=0.2), TaskMapping((170, 427, 427), 1, (1, 1, 1))
    ),
    "Sampling gets slower with threads": Scenario(
        replace(_NODE, sampling=0.6, sampling_threads=-1.0, loading=0.1), TaskMapping((170, 427, 427), 1, (1, 1, 6))
    ),
}


_FOUND: dict[str, float] = {}


def best(node: Node, threads: int, sampling: float) -> float:
    """Return the cached result of :func:`_best` for a node."""
    key = str([value for name, value in vars(node).items() if name not in ("source", "warm_up")] + [threads, sampling])
    if key not in _FOUND:
        _FOUND[key] = _best(node, threads, sampling)
    return _FOUND[key]


def _best(node: Node, threads: int, sampling: float) -> float:
    """Return the seconds of an iteration with the best mapping, from a search over all threads and many splits."""
    found = float("inf")
    shares = [share / 20 for share in range(1, 20)] if sampling else [0.0]
    for sampler in range(1, threads - 1):
        for loader in range(1, threads - sampler):
            trainer = threads - sampler - loader
            for share in shares:
                mapping = TaskMapping((1,) * len(node.speeds), node.cpu_trainers, (sampler, loader, trainer), share)
                others = node.ideal(mapping)
                least = max(others.sample_cpu or 0.0, others.load or 0.0, others.sample_accelerator or 0.0)
                if least >= found:
                    continue
                for beside in (True, False):
                    split = _even(node, trainer, beside)
                    found = min(found, max(least, split) * (node.drag if beside else 1.0))
    return found


def _even(node: Node, threads: int, beside: bool) -> float:
    """Return the seconds in which all trainers together finish the batch, by bisection."""
    overheads = node.overheads or [0.0] * len(node.speeds)
    low, high = 0.0, 1e4
    for _ in range(50):
        seconds, done, there = (low + high) / 2, 0.0, 0.0
        for index, (speed, overhead) in enumerate(zip(node.speeds, overheads, strict=True)):
            cpu = index < node.cpu_trainers
            if cpu and not beside:
                continue
            factor = node.reference_threads / threads if cpu and node.reference_threads else 1.0
            seeds = max(0.0, (seconds / factor - overhead) * speed)
            done, there = (done + seeds, there) if cpu else (done, there + seeds)
        if node.transfer:
            there = min(there, seconds / node.transfer)
        low, high = (low, seconds) if done + there >= BATCH else (seconds, high)
    return high


def excess(make: Callable[[TaskMapping], Manager], scenario: Scenario, iterations: int, seed: int) -> float:
    """Return the training time in excess of that with the best mapping at each moment, in percent."""
    source = random.Random(seed)
    calm = replace(scenario.node, source=source)
    begin = scenario.begin
    manager = make(begin)
    in_flight, mapping = deque([manager.mapping] * (LAG + 1)), manager.mapping
    spent = ideal = 0.0
    for part in range(3):
        node = replace(scenario.change(calm), source=source) if scenario.change and part == 1 else calm
        least = best(node, sum(begin.threads), begin.accelerator_sampling)
        for _ in range(iterations // 3):
            last, mapping = mapping, in_flight.popleft()
            spent += node.seconds(mapping) + (scenario.move * least if mapping != last else 0.0)
            ideal += least
            manager.observe(node.measured(mapping))
            in_flight.append(manager.mapping)
    return 100 * (spent / ideal - 1)


class Static:
    """No manager at all."""

    def __init__(self, mapping: TaskMapping) -> None:
        self.mapping = mapping

    def observe(self, times: IterationTimes) -> None:
        """Change nothing."""


WAYS: dict[str, tuple[Callable[[TaskMapping], Manager], list[tuple[Any, str, Any]]]] = {
    "no manager": (Static, []),
    "algorithm 1 as published": (PublishedResourceManager, []),
    "ours": (DynamicResourceManager, []),
    "ours, times are proportional to work": (DynamicResourceManager, [(costs, "RIDGE", 1e9)]),
    "ours, the last 20 measurements": (DynamicResourceManager, [(costs, "HISTORY", 20)]),
    "ours, times of an earlier speed are kept": (DynamicResourceManager, [(costs, "CHANGE", 1e9)]),
    "ours, no dead band": (DynamicResourceManager, [(drm, "DEAD_BAND", 0.0)]),
    "ours, without a trial of the CPU trainers": (partial(DynamicResourceManager, tries_cpu=False), []),
    "ours, changes are never undone": (DynamicResourceManager, [(DynamicResourceManager, "_undo", lambda *_: None)]),
}
"""The managers, with the functions that each replaces."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return percent in excess of the best mappings by manager and scenario."""
    args = parse("resource_manager", __doc__ or "", {"iterations": (300, 60)}, argv, runs=3)
    described = machine()
    names = [name for name in SCENARIOS if not args.quick or name in ("nothing changes", "bad first mapping")]
    results: dict[str, dict[str, float]] = {}
    for way, (make, replaced) in WAYS.items():
        if args.only not in way:
            continue
        with ExitStack() as stack:
            for owner, name, value in replaced:
                stack.enter_context(patch.object(owner, name, value))
            results[way] = {}
            for name in names:
                found = [excess(make, SCENARIOS[name], args.iterations, seed) for seed in range(args.runs)]
                results[way][name] = round(statistics.mean(found), 2)
        results[way]["mean"] = round(statistics.mean(results[way].values()), 2)
        print(f"{results[way]['mean']:8.2f} %  {way}")
    result = {
        "benchmark": "resource_manager",
        "unit": "percent beyond the time with the best mapping at each moment",
        "settings": {"runs": args.runs, "iterations": args.iterations, "noise": NOISE, "lag": LAG},
        "machine": described,
        "results": results,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()

"""All GPU benchmarks, the most telling first; a second call goes on where the first one ended.

Samples are first compared with the CPU's. Each part is written as soon as it is there: parts of one graph into
gpu_first.json, others into files of their own, and all of them onto the page gpu.md. A part that was finished with the
same settings on the same machine is skipped. No part begins that would probably not end within ``--minutes``.

One process measures all, with threads as contestants where a CPU's benchmark has processes; hybrid training adds a
script of at most two ranks. Before the first part, kernels are compiled side by side on a small graph. With
``--interpret``, kernels are interpreted, and a CPU takes the GPU's place in training: a rehearsal.

The last parts are benchmarks that the CPU has too, against PyG. For bare loaders, PyG's PrefetchLoader overlaps copies
to the GPU with preparation, on both sides; in epochs, Lightning copies from pinned memory. Requires CUDA, and no Hydra.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from benchmarks import harness
from benchmarks.device_clock import failure
from benchmarks.gpu.page import page
from benchmarks.harness import RESULTS, check_out, machine, shortened

PARTS = {
    "check": 0.4, "layers": 1.0, "profile": 0.3, "steps": 1.2, "full_graph": 0.6, "collective": 1.9, "hyscale": 1.9,
    "samples": 0.4, "phases": 0.2, "places": 0.4, "host_bulks": 0.3, "persistent": 1.0, "launches": 1.0,
    "loaders": 1.0, "aggregate_blocks": 1.0, "shards": 2.0, "minibatch": 2.0, "epoch": 4.0, "aggregate": 1.0,
}  # fmt: skip
"""The parts in order, with the minutes that each is guessed to take until it has been measured."""
ONE_GRAPH = (
    "check", "layers", "profile", "steps", "samples", "phases", "places", "launches", "loaders", "shards",
)  # fmt: skip
SCRIPTS = {
    "host_bulks": "gpu.host", "full_graph": "full_graph.epochs", "collective": "collective.epochs",
    "hyscale": "hyscale.epochs", "minibatch": "sampling.minibatch", "epoch": "models.epoch",
    "aggregate": "ops.aggregate",
}  # fmt: skip
REHEARSED = ("full_graph", "collective", "hyscale")
"""Those of them that a CPU can take part in."""
SAME = ("gpu", "cpu", "cores", "python", "torch", "triton")
"""What two machines have in common if they are the same."""
SMALL: dict[str, Any] = {"nodes": 20_000, "edges": 400_000, "batch_size": 128, "batches": 16}
TINY: dict[str, Any] = {"nodes": 80, "edges": 400, "features": 3, "fanouts": (2, 1), "batch_size": 4, "batches": 2,
                        "warm": 1, "bulks": (2,), "small": {"num_programs": 1, "num_warps": 1}}  # fmt: skip


class Everything:
    """The parts, what is known of each, and their files."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start, self.machine = args, time.perf_counter(), machine()
        self.device = torch.device("cpu") if args.interpret else torch.device("cuda", torch.cuda.current_device())
        self.ranks = 2 if args.interpret else torch.cuda.device_count()
        self.settings = {"runs": args.runs, "quick": args.quick, "interpret": args.interpret}
        self.wrong: list[str] = []
        self.index = {"benchmark": "gpu_first", "parts": {}, "measured": {}} | self.earlier("first")
        cannot = {name for name, module in SCRIPTS.items() if not find_spec(f"benchmarks.{module}")}
        cannot |= SCRIPTS.keys() - set(REHEARSED) if args.interpret else set()
        cannot |= {"shards"} if self.ranks < 2 else set()
        wanted = [name for name in PARTS if name not in cannot and name in (args.only or name).split(",")]
        self.left = [name for name in wanted if args.fresh or not self.known(name).get("finished")]
        self.done = [name for name in wanted if name not in self.left]
        self.threads, self.hybrid = torch.get_num_threads(), None

    @cached_property
    def graph(self) -> Any:
        """The graph of most parts."""
        from benchmarks.gpu.one_graph import OneGraph

        return OneGraph(
            self.device, runs=self.args.runs, **TINY if self.args.interpret else SMALL if self.args.quick else {}
        )

    def earlier(self, name: str) -> dict[str, Any]:
        """Read what an earlier call wrote into the same folder, or else what the repository has."""
        folders = [self.args.out] if self.args.quick or self.args.interpret else [self.args.out, RESULTS]
        files = [folder / f"gpu_{name}.json" for folder in folders if folder is not None]
        return next((json.loads(file.read_text()) for file in files if file.exists()), {})

    def known(self, name: str) -> dict[str, Any]:
        """Return how a part was measured, if with these settings on this machine."""
        entry: dict[str, Any] = self.index["measured"].get(name, {"machine": {}})
        same = all(entry["machine"].get(key) == self.machine.get(key) for key in SAME)
        return entry if same and entry["settings"] == self.settings else {}

    def minutes(self, name: str) -> float:
        """Return the minutes that a part took, or should take."""
        return float(self.known(name).get("minutes", PARTS[name]))

    def passed(self) -> float:
        """Return the minutes since the start."""
        return (time.perf_counter() - self.start) / 60

    def fits(self, name: str) -> bool:
        """Return whether a part would probably end in time."""
        return self.passed() + self.minutes(name) <= self.args.minutes

    def prepare(self) -> None:
        """Start the script of hybrid training, compile kernels while the graph is made, and wait for ``--after``."""
        if "hyscale" in self.left:
            self.hybrid = import_module("benchmarks.hyscale.epochs").OneScript(
                self.device, min(self.args.runs, 3), self.args.quick or self.args.interpret
            )
        wait = compile_ahead(self.device) if self.device.type == "cuda" else list
        if {*ONE_GRAPH, "collective"} & {*self.left}:
            print(f"bench-gpu: a graph of {self.graph.nodes:,} nodes, {self.graph.edges:,} edges", flush=True)
        wait()
        while self.args.after and runs(self.args.after):
            time.sleep(0.1)
        print(f"bench-gpu: prepared in {self.passed():.2f} minutes", flush=True)

    def run(self) -> None:
        """Measure part after part, without those that would take too long."""
        if any(map(self.fits, self.left)):
            self.prepare()
        while (name := next(filter(self.fits, self.left), None)) is not None:
            begin = self.passed()
            self.left.remove(name)
            print(f"bench-gpu: {name}, about {self.minutes(name):g} minutes", flush=True)
            try:
                found = self.measure(name)
                finished = found.pop("finished", True)
                self.wrong += found.get("wrong") or []
            except (Exception, SystemExit) as error:  # the other parts go on; the next call tries again
                found, finished = {"failed": {"failed": failure(error)}}, False
                print(f"bench-gpu: {name}: {failure(error)}; {str(error)[-300:].splitlines()[-1:]}", flush=True)
            self.keep(name, found, finished, self.passed() - begin)
            print(f"bench-gpu: {name} took {self.passed() - begin:.2f} minutes", flush=True)
            torch.set_num_threads(self.threads)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def measure(self, name: str) -> dict[str, Any]:
        """Measure a part."""
        args = self.args
        if name == "check":
            found = self.graph.check()
            return {**found, "finished": not found["wrong"]}
        if name == "shards":
            options = {"bulk": 1, "prefetch": 0} if args.interpret else {}
            return dict(import_module("benchmarks.gpu.shards").measure(self.graph, self.ranks, options))
        if name in ONE_GRAPH:
            return dict(self.graph.measure(name))
        if name == "aggregate_blocks":
            return dict(import_module("benchmarks.gpu.aggregate_blocks").run(self.device, args.runs, args.interpret))
        if name == "persistent":
            from benchmarks.gpu import persistent

            earlier = self.earlier(name) if self.known(name) and not args.fresh else {}
            limit_s, runs = 60 * (args.minutes - self.passed()) - 30, 2 if args.interpret else 10
            return persistent.run(self.device, runs, args.quick, args.interpret, limit_s, earlier, self.keep)
        module = import_module(f"benchmarks.{SCRIPTS[name]}")
        if name == "full_graph":
            return dict(module.measure_here(self.device, args.runs, args.quick, args.interpret))
        if name == "collective":
            earlier = self.earlier(name) if self.known(name) and not args.fresh else {}
            limit_s, runs = 60 * (args.minutes - self.passed()) - 30, min(args.runs, 3)
            keep = partial(self.keep, name)
            return dict(module.measure_here(self.graph, runs, args.interpret, limit_s, earlier, keep))
        if name == "hyscale":
            try:
                return dict(self.hybrid.measure())
            finally:
                self.end()
        with in_threads(module):
            return self.measure_as_on_the_cpu(name, module)

    def measure_as_on_the_cpu(self, name: str, module: Any) -> dict[str, Any]:
        """Measure a part that the CPU has too."""
        args = self.args
        if name not in ("minibatch", "epoch"):  # these detect the GPU themselves
            out = [] if args.out is None else ["--out", str(args.out / f"gpu_{name}.json")]
            return dict(module.main([*["--quick"] * args.quick, *out]))
        sizes = {size: small if args.quick else full for size, (full, small) in module.SIZES.items()}
        what, unit, more = "Mini-batches", "ms per mini-batch", {}
        if name == "epoch":
            what, unit, more = "Training epoch", "s per epoch", {"models": tuple(module.MODELS)}
        rows = module.run(sizes, min(args.runs, 3), device="cuda", **more)
        return {
            "title": f"GPU: {name}, {sizes['nodes']:,} nodes, {sizes['edges']:,} edges, {sizes['features']} features",
            "unit": unit, "settings": {**sizes, "runs": min(args.runs, 3)}, "rows": rows,
            "comparisons": module.comparisons(rows, f"{what} on a GPU", None),
        }  # fmt: skip

    def keep(self, name: str, found: dict[str, Any], finished: bool = False, minutes: float | None = None) -> None:
        """Write the figures of a part, what is known of all, and the page."""
        entry = {"machine": self.machine, "settings": self.settings, "finished": finished}
        self.index["measured"][name] = entry | ({} if minutes is None else {"minutes": round(minutes, 2)})
        self.index["machine"] = self.machine
        files = {"first": self.index}
        if name in ONE_GRAPH:
            self.index["parts"][name] = found
        elif "failed" not in found:
            files[name] = {"benchmark": f"gpu_{name}", "machine": self.machine, **found}
        if self.args.out is None:
            print(json.dumps(found))
            return
        self.args.out.mkdir(parents=True, exist_ok=True)
        for part, content in files.items():
            short = json.loads(json.dumps(content), parse_float=lambda text: shortened(float(text)))
            (self.args.out / f"gpu_{part}.json").write_text(json.dumps(short, indent=1) + "\n")
        others = {part: self.earlier(part) for part in PARTS if part not in ONE_GRAPH}
        (self.args.out / "gpu.md").write_text(page(self.index, others))

    def end(self) -> None:
        """End the script of hybrid training."""
        if self.hybrid is not None:
            self.hybrid.close()
            self.hybrid = None

    def close(self) -> None:
        """Print what is left and how to go on, or raise if samples were wrong."""
        if self.done:
            print(f"bench-gpu: measured before, so skipped: {', '.join(self.done)}; --fresh measures again")
        left = [name for name in PARTS if name in self.left or self.known(name).get("finished") is False]
        if left:
            least = max(math.ceil(self.minutes(left[0])) + 1, math.ceil(self.args.minutes))
            options = " ".join(["--quick"] * self.args.quick + [f"--minutes {least}"])
            told = ", ".join(f"{name} (about {self.minutes(name):g} minutes)" for name in left)
            print(f'bench-gpu: left: {told}; to go on: make bench-gpu ARGS="{options}"')
        else:
            print("bench-gpu: all is measured; python -m benchmarks.report takes the figures into the documentation")
        if self.wrong:
            raise SystemExit(f"bench-gpu: samples differ from the CPU's: {'; '.join(self.wrong)}")


@contextmanager
def in_threads(module: Any) -> Iterator[None]:
    """Run contestants that a module starts as processes in threads of this process."""
    with ExitStack() as stack:
        for place in (harness, module):
            if hasattr(place, "Isolated"):
                stack.enter_context(mock.patch.object(place, "Isolated", harness.InThread))
        yield


def compile_ahead(device: torch.device, threads: int = 8) -> Callable[[], Any]:
    """Compile kernels of samplers and layers in threads, which run in parallel, on a small graph; return a wait for it.

    What fails here will say so where it is measured.
    """
    from benchmarks.gpu import layers
    from benchmarks.gpu.one_graph import OneGraph

    small = OneGraph(device, **SMALL | {"batches": 1, "runs": 1})
    there = small.host.to(device)

    def sample(mode: str) -> None:
        sampler = small.sampler(there, mode=mode)
        small.sample(sampler, 0)
        if mode == "fused":
            small.bulk(sampler, 2, 0)

    def run(call: Callable[[], Any]) -> None:
        # The backward pass, too, in this thread: a device has a single thread of its own.
        with suppress(Exception), torch.autograd.set_multithreading_enabled(False):
            call()

    steps = [call for name, call in layers.contestants(small).items() if name.endswith("ours")]
    calls = [partial(sample, mode) for mode in ("fused", "persistent", "hop_by_hop")]
    calls += [partial(step, 0) for step in steps]
    return partial(list, ThreadPoolExecutor(threads).map(run, calls))


def runs(pid: int) -> bool:
    """Return whether a process has not ended."""
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def main(argv: Sequence[str] | None = None) -> Everything | None:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.everything", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no part that would end later (default: 8)")
    parser.add_argument("--fresh", action="store_true", help="measure finished parts again")
    parser.add_argument("--only", default="", help=f"some of these, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--runs", type=int, help="number of counted rounds (default: 5, quick: 2)")
    parser.add_argument("--quick", action="store_true", help="use small sizes; write files only with --out")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes under TRITON_INTERPRET=1: no real times")
    parser.add_argument("--after", type=int, help="measure once the process with this number has ended")
    parser.add_argument("--out", type=Path, help="folder of the files (default: benchmarks/results)")
    args = parser.parse_args(argv)
    if not args.interpret and not torch.cuda.is_available():
        print("bench-gpu: no CUDA device found (torch.cuda.is_available() is False), so there is nothing to measure.")
        return None
    if args.interpret and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("bench-gpu: --interpret needs TRITON_INTERPRET=1 in the environment")
    if unknown := {*args.only.split(",")} - {*PARTS, ""}:
        raise SystemExit(f"bench-gpu: unknown --only {', '.join(sorted(unknown))}; use some of {', '.join(PARTS)}")
    args.runs = args.runs or (2 if args.quick or args.interpret else 5)
    if args.out is None and not args.quick and not args.interpret:
        args.out = RESULTS
    if args.out is not None:
        check_out(parser, args.out)
    everything = Everything(args)
    logging.disable(logging.INFO)  # Lightning's, of every Trainer
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            everything.run()
    finally:
        logging.disable(logging.NOTSET)
        everything.end()
    everything.close()
    return everything


if __name__ == "__main__":
    main()

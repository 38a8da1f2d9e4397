"""All GPU benchmarks, the most telling first; a second call goes on where the first one ended.

Samples are first compared with the CPU's. Each part is written as soon as it is there: parts of one graph into
gpu_first.json, others into files of their own, and all of them onto the page gpu.md. A part that was finished with the
same settings on the same machine is skipped. No part begins that would probably not end within ``--minutes``.

The last parts are benchmarks that the CPU has too, against PyG. For bare loaders, PyG's PrefetchLoader overlaps copies
to the GPU with preparation, on both sides; in epochs, Lightning copies from pinned memory. Requires CUDA, and no Hydra.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.device_clock import failure
from benchmarks.gpu.page import page
from benchmarks.harness import RESULTS, check_out, machine, shortened

ONE_GRAPH = {
    "check": 2.0, "layers": 1.0, "steps": 1.0, "samples": 0.5, "launches": 1.0, "loaders": 1.0, "places": 0.5,
    "shards": 2.0,
}  # fmt: skip
PARTS = {
    "check": 2.0, "host_bulks": 1.0, **ONE_GRAPH, "aggregate_blocks": 1.0, "persistent": 2.0, "full_graph": 4.0,
    "hyscale": 8.0, "collective": 8.0, "minibatch": 4.0, "epoch": 8.0, "aggregate": 2.0,
}  # fmt: skip
"""The parts in order, with the minutes that each is guessed to take until it has been measured."""
SCRIPTS = {
    "host_bulks": "gpu.host", "full_graph": "full_graph.epochs", "hyscale": "hyscale.epochs",
    "collective": "collective.epochs", "minibatch": "sampling.minibatch", "epoch": "models.epoch",
    "aggregate": "ops.aggregate",
}  # fmt: skip
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
        cannot = {name for name, module in SCRIPTS.items() if args.interpret or not find_spec(f"benchmarks.{module}")}
        cannot |= {"shards"} if self.ranks < 2 else set()
        wanted = [name for name in PARTS if name not in cannot and name in (args.only or name).split(",")]
        self.left = [name for name in wanted if args.fresh or not self.known(name).get("finished")]
        self.done = [name for name in wanted if name not in self.left]

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

    def run(self) -> None:
        """Measure part after part until one would take too long."""
        while self.left and self.passed() + self.minutes(self.left[0]) <= self.args.minutes:
            name, begin = self.left.pop(0), self.passed()
            print(f"bench-gpu: {name}, about {self.minutes(name):g} minutes", flush=True)
            try:
                found = self.measure(name)
                finished = found.pop("finished", True)
                self.wrong += found.get("wrong") or []
            except (Exception, SystemExit) as error:  # the other parts go on; the next call tries again
                found, finished = {"failed": {"failed": failure(error)}}, False
                print(f"bench-gpu: {name}: {failure(error)}", flush=True)
            self.keep(name, found, finished, self.passed() - begin)
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


def main(argv: Sequence[str] | None = None) -> Everything | None:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.everything", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no part that would end later (default: 8)")
    parser.add_argument("--fresh", action="store_true", help="measure finished parts again")
    parser.add_argument("--only", default="", help=f"some of these, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--runs", type=int, help="number of counted rounds (default: 5, quick: 2)")
    parser.add_argument("--quick", action="store_true", help="use small sizes; write files only with --out")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes under TRITON_INTERPRET=1: no real times")
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
    everything.run()
    everything.close()
    return everything


if __name__ == "__main__":
    main()

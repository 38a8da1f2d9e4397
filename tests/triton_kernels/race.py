"""Run every program of a launch as a process over shared memory: real races without a GPU. Run as a script.

CPUs keep stores in order, so this finds protocol errors (lost tasks, duplicate work, early exits, deadlocks), but no
errors of memory ordering.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import inspect
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import triton.runtime.interpreter as interpreter

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import baselines
from lightning_gnn.graph import CSCGraph, HeteroCSCGraph
from lightning_gnn.ops import Labor, sample_hetero_neighbors, sample_neighbors
from lightning_gnn.ops.sample import triton as operator
from lightning_gnn.triton_kernels import sample as module
from lightning_gnn.triton_kernels import sample_relations
from lightning_gnn.triton_kernels.sample_bulk import sample_bulk
from tests.batch_checks import assert_equal
from tests.patience import PATIENCE
from tests.triton_kernels.sampling_cases import GRAPHS, SMALL_CACHE, assert_equal_to_reference, shard_table


class Forked:
    """A kernel whose programs run concurrently."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launch(grid[0], args, kwargs)

    def launch(self, programs, args, kwargs):
        children = []
        for program in range(programs):
            child = os.fork()
            if child == 0:
                try:
                    self.run(program, programs, args, kwargs)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            children.append(child)
        deadline, running, failed = time.monotonic() + PATIENCE, set(children), 0
        while running and time.monotonic() < deadline:
            for child in list(running):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    running.discard(child)
                    failed += status != 0
            time.sleep(0.002)
        for child in running:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert not running, f"{len(running)} of {programs} programs did not end"
        assert not failed, f"{failed} of {programs} programs failed"

    def run(self, program, programs, args, kwargs):
        rng = random.Random(os.getpid())
        builder = interpreter.InterpreterBuilder
        original = builder.create_atomic_rmw

        def delayed(*arguments):
            out = original(*arguments)
            if rng.random() < 0.2:
                time.sleep(rng.random() * 0.002)
            return out

        builder.create_atomic_rmw = delayed
        fn = self.kernel.rewrite() if hasattr(self.kernel, "rewrite") else self.kernel.fn
        executor = interpreter.GridExecutor(fn, self.kernel.arg_names, (programs,))
        interpreter._patch_lang(executor.fn)
        kwargs = {name: value for name, value in kwargs.items() if name in inspect.getfullargspec(executor.fn).args}
        bound = inspect.getcallargs(executor.fn, *args, **kwargs)
        bound = {n: v if n in executor.constexprs else interpreter._implicit_cvt(v) for n, v in bound.items()}
        interpreter.interpreter_builder.set_grid_dim(programs, 1, 1)
        interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
        executor.fn(**bound)


class SharedSampler(baselines.BaselineSampler):
    """Allocates scratch memory that forked programs share."""

    def _allocate(self, size, dtype):
        return torch.zeros(size, dtype=dtype).share_memory_()


class SharedRelationSampler(sample_relations.TritonRelationSampler):
    """Allocates scratch memory that forked programs share."""

    _allocate = SharedSampler._allocate


def main():
    torch.set_num_threads(1)
    module.hop_kernel, module.queue_kernel = Forked(module.hop_kernel), Forked(module.queue_kernel)
    baselines.discover_kernel = Forked(baselines.discover_kernel)
    module.INTERPRETED = False  # concurrent programs can meet at a barrier
    for name, mode, seeds, fanouts in (
        ("random", "fused", [3, 0, 40], [4, 3]),
        ("random", "fused", [*range(50), *range(45)], [-1, 5]),  # several tiles for each program
        ("random", "persistent", [3, 0, 40], [4, 3, 2]),
        ("path", "persistent", [0], [1] * 6),
        ("cycle", "no_queue", [0, 3], [1, 1]),
        ("random", "persistent", [0, 0, 7, 8], [-1, 5]),
    ):
        indptr, indices = GRAPHS[name]
        sampler = SharedSampler(
            torch.tensor(indptr), torch.tensor(indices), mode=mode, fetch_size=2, num_programs=3, num_warps=1
        )
        assert_equal_to_reference(sampler, GRAPHS[name], seeds, fanouts, key=11)
        print(mode, "on", name, "equal", flush=True)
    sampler = SharedSampler(*(torch.tensor(array) for array in GRAPHS["random"]), num_programs=3, num_warps=1)
    seeds, keys = [torch.tensor([3, 0, 40]), torch.tensor([7]), torch.tensor([0, 0])], [1, 2, 3]
    for made, own, key in zip(sample_bulk(sampler, seeds, [3, 2], keys), seeds, keys, strict=True):
        wanted = sample_neighbors(CSCGraph(*sampler.graph[:2]), own, [3, 2], key, backend="reference")
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(made[:3], wanted[:3], strict=True))
    print("a bulk on random equal", flush=True)
    sampler.l2_bytes = SMALL_CACHE
    assert_equal_to_reference(sampler, GRAPHS["random"], [*range(50), *range(45)], [5, 3], key=11)
    print("a table of nodes equal", flush=True)
    graph = CSCGraph(*sampler.graph[:2])
    for seeds, fanouts in (([3, 0, 40, 3], [4, 3, 2]), ([*range(50), *range(45)], [-1, 5, 2])):
        sampler = SharedSampler(*sampler.graph[:2], num_programs=3, num_warps=1, every_hop=True)
        made = sampler.sample(torch.tensor(seeds), fanouts, 11)
        assert_equal(made, tuple(sample_neighbors(graph, torch.tensor(seeds), fanouts, 11, every_hop=True)))
    print("every hop equal", flush=True)
    indptr, indices = (torch.tensor(array) for array in GRAPHS["random"])
    shards = shard_table(indices.int().view(-1, 1), 3, 1, own=1, place=torch.Tensor.share_memory_)
    sampler = SharedSampler(indptr, shards.local.view(-1), shards=shards, num_programs=3, num_warps=1)
    assert_equal_to_reference(sampler, GRAPHS["random"], [3, 0, 40], [4, 3], key=11)
    print("lists dealt out to 3 equal", flush=True)
    sample_relations.relation_kernel = Forked(sample_relations.relation_kernel)
    indptr, indices = (torch.tensor(array) for array in GRAPHS["random"])
    plain = CSCGraph.from_csc(indptr, indices)
    weighted = plain.with_weight(torch.rand(indices.numel()))
    for kind, part, options in (
        ("disjoint", plain, {"disjoint": True}),
        ("weighted", weighted, {}),
        ("LABOR", plain, {"labor": Labor()}),
    ):
        graph = HeteroCSCGraph.build({"a": 60}, {("a", name, "a"): part for name in "xy"})
        sampler = SharedRelationSampler([60], torch.device("cpu"), num_programs=3, num_warps=1)
        operator._relation_samplers.setdefault(graph, {})[sampler.device] = sampler
        seeds = {"a": torch.tensor([3, 0, 40])}
        wanted, made = (
            sample_hetero_neighbors(graph, seeds, [3, 2], 11, backend=backend, **options)
            for backend in ("reference", "triton")
        )
        assert_equal(made, wanted)
        print(kind, "edge types equal", flush=True)


if __name__ == "__main__":
    main()

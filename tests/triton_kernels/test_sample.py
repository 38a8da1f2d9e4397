import dataclasses
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists on Linux only")
import triton.runtime.interpreter as interpreter

from benchmarks.gpu.baselines import MODES, BaselineSampler
from lightning_gnn.gpu_sampling.sampler import MODES as SAMPLER_MODES
from lightning_gnn.graph import CSCGraph
from lightning_gnn.ops import sample_neighbors
from lightning_gnn.triton_kernels import sample as module
from lightning_gnn.triton_kernels.sample import Batch, TritonNeighborSampler, queue_supports
from lightning_gnn.triton_kernels.sample_bulk import sample_bulk
from tests.campaigns import campaign
from tests.triton_kernels import sampling_cases
from tests.triton_kernels.sampling_cases import GRAPHS, SMALL_CACHE, assert_equal_to_reference, draw_graph, shard_table

pytestmark = pytest.mark.skipif(not module.INTERPRETED, reason="kernels are compiled here; the cuda tests check them")
QUEUE_MODES = ("persistent", "no_queue")
KINDS = ("fused", "persistent", "no_queue", "hop_by_hop")  # launches as in hop_by_hop
USED = KINDS[:2]  # used in training; the others are for comparison


def select(mode):
    return TritonNeighborSampler if mode in SAMPLER_MODES else BaselineSampler


def make_sampler(graph, dtype=torch.int32, **options):
    indptr, indices = graph
    options = {"num_warps": 1, "num_programs": 2, **options}
    return select(options.get("mode", "fused"))(torch.tensor(indptr), torch.tensor(indices, dtype=dtype), **options)


@pytest.mark.slow
@pytest.mark.parametrize("mode", USED)
@pytest.mark.parametrize("name", GRAPHS)
def test_equals_reference_on_every_kind_of_graph(name, mode):
    graph = GRAPHS[name]
    last = len(graph[0]) - 2
    sampler = make_sampler(graph, mode=mode, fetch_size=3)
    if mode in QUEUE_MODES:
        assert_equal_to_reference(sampler, graph, [0], [1, 1, 1])
    assert_equal_to_reference(sampler, graph, [0, last, 1, 0, 0], [3, 2], key=-(2**63))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fused", "persistent"])
@pytest.mark.parametrize(
    "fanouts", [[0], [-1], [2, 0, 3], [-1, -1], [-1, 4], [2, 4, 8], [5, 3, 1], [40, 2], [3, -1], [2, 16]], ids=str
)
def test_equals_reference_for_every_kind_of_fanout(fanouts, mode):
    graph = GRAPHS["random"]
    sampler = make_sampler(graph, mode=mode, fetch_size=7)
    assert_equal_to_reference(sampler, graph, [0, 5, 17, 0], fanouts, key=99)
    if fanouts in ([-1, 4], [2, 4, 8], [5, 3, 1], [40, 2]):
        assert_equal_to_reference(sampler, graph, [5, 5, 0], fanouts, key=99, replace=True)


@pytest.mark.slow
@campaign
@pytest.mark.parametrize("mode", MODES)
def test_equals_reference_on_random_cases(mode, number):
    rng = random.Random(number)
    num_nodes = rng.choice([1, 5, 50, 150])
    graph = draw_graph(num_nodes, rng.choice([num_nodes, 6 * num_nodes]), number)
    dtype = rng.choice([torch.int32, torch.int64])
    sampler = make_sampler(graph, dtype, mode=mode, fetch_size=rng.choice([1, 4, 40]), num_programs=rng.choice([1, 3]))
    for disjoint in (False, True):
        seeds = [rng.randrange(num_nodes) for _ in range(rng.choice([1, 4, 40]))]
        fanouts = sorted((rng.randrange(1, 9) for _ in range(rng.choice([1, 2, 3]))), reverse=True)
        key, first_tree = rng.randrange(-(2**63), 2**63), rng.choice([0, 7, 2**40])
        replace, ids = rng.random() < 0.3, rng.choice([torch.int32, torch.int64])
        assert_equal_to_reference(sampler, graph, seeds, fanouts, key, replace, disjoint, first_tree, ids)


@pytest.mark.slow
@pytest.mark.parametrize("mode", QUEUE_MODES)
@pytest.mark.parametrize("num_programs", [1, 3])
def test_every_fetch_size(mode, num_programs):
    graph = GRAPHS["clique"]
    for fetch_size in (1, 2, 3, 5, 13, 33, 1000) if num_programs == 3 else (1, 4, 32):
        sampler = make_sampler(graph, mode=mode, fetch_size=fetch_size, num_programs=num_programs)
        assert_equal_to_reference(sampler, graph, [2, 5], [2, 2], key=fetch_size)


@pytest.mark.slow
@pytest.mark.parametrize("mode", QUEUE_MODES)
def test_long_path_with_one_seed_keeps_every_program_waiting(mode):
    assert_equal_to_reference(
        make_sampler(GRAPHS["path"], mode=mode, fetch_size=5, num_programs=3), GRAPHS["path"], [0], [1] * 12
    )


@pytest.mark.slow
def test_equals_numba_on_a_larger_graph():
    indptr, indices = draw_graph(800, 6000, seed=3, hub=0.01)
    graph = CSCGraph.from_csc(torch.tensor(indptr), torch.tensor(indices, dtype=torch.int32))
    seeds = torch.randint(0, 800, (30,), generator=torch.Generator().manual_seed(0))
    wanted = sample_neighbors(graph, seeds, [8, 5], key=7, backend="numba")
    for mode in MODES:
        sampler = select(mode)(graph.indptr, graph.indices, mode=mode, num_programs=3, num_warps=16, fetch_size=50)
        out = sampler.sample(seeds, [8, 5], 7)
        assert all(torch.equal(a, b) for a, b in zip(out[:3], wanted[:3], strict=True)), mode
        assert out[3] is None
        assert out[4:] == wanted[4:]


@pytest.mark.slow
@pytest.mark.parametrize("mode", KINDS)
def test_grows_when_a_batch_does_not_fit(mode):
    graph = GRAPHS["random"]
    sampler = make_sampler(graph, mode=mode)
    sampler._start_capacity = 1
    for disjoint in (False, True)[: 2 if mode == "fused" else 1]:
        assert_equal_to_reference(sampler, graph, [0, 3], [-1, 6], disjoint=disjoint)
    held = sampler.scratch_bytes
    assert_equal_to_reference(sampler, graph, [3, 1], [-1, 6])
    assert sampler.scratch_bytes == held


@pytest.mark.slow
def test_launches_are_prepared_once_per_shape_until_the_scratch_memory_grows(monkeypatch):
    monkeypatch.setattr(module, "_MOST_PREPARED", 2)
    sampler, graph = make_sampler(GRAPHS["random"], start_edges=60), GRAPHS["random"]
    assert_equal_to_reference(sampler, graph, [3, 1], [2, 2])
    (first,) = sampler._prepared.values()
    assert_equal_to_reference(sampler, graph, [0, 5], [2, 2], 4)
    assert [*sampler._prepared.values()] == [first]
    assert first.src.numel() == 2 + 4 + 8
    for size in (1, 2):
        assert_equal_to_reference(sampler, graph, [*range(size)], [2])
        assert len(sampler._prepared) <= 2
    assert_equal_to_reference(sampler, graph, [*range(10)], [4, 3])
    assert first not in sampler._prepared.values()
    assert_equal_to_reference(sampler, graph, [3, 1], [2, 2])


def hashed_sampler(graph, **options):
    sampler = make_sampler(graph, **options)
    sampler.l2_bytes = SMALL_CACHE
    return sampler


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "duplicate edges", "no edges"])
def test_a_table_of_nodes_gives_equal_samples_and_is_at_most_half_full(name):
    graph = GRAPHS[name]
    seeds = [0, len(graph[0]) - 2, 1, 0]
    for options in ({}, {"mode": "persistent"}):
        sampler = hashed_sampler(graph, **options)
        sampler._start_capacity = 1  # the scratch memory grows, the table need not
        for key, fanouts in enumerate(([3, 2], [-1, 20], [2, 4, 1])):
            assert_equal_to_reference(sampler, graph, seeds, fanouts, key, replace=key == 2)
            if "node_table" in sampler._buffers:
                table = sampler._buffers["node_table"]
                used = (table >> 32 == sampler._stamp).sum()
                assert 0 < used <= table.numel() // 2
        assert_equal_to_reference(sampler, graph, seeds, [3, 2], 5, disjoint=True)  # uses the same words of slots
        assert_equal_to_reference(sampler, graph, seeds, [3, 2], 6)


@settings(deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 200),
    st.integers(0, 2**32),
    st.lists(st.integers(-1, 20), min_size=1, max_size=3),
)
@pytest.mark.slow
def test_a_table_of_nodes_on_random_graphs(num_nodes, num_edges, number, fanouts):
    graph = draw_graph(num_nodes, num_edges, number)
    sampler = hashed_sampler(graph, num_programs=1 + number % 3)
    seeds = [number % num_nodes, 0, num_nodes - 1]
    for key in range(2):  # the second one finds the entries of the first
        assert_equal_to_reference(sampler, graph, seeds, fanouts, key)
    whole = CSCGraph.from_csc(torch.tensor(graph[0]), torch.tensor(graph[1], dtype=torch.int32))
    own = [torch.tensor(seeds), torch.tensor([0])]
    for sample, part, key in zip(sample_bulk(sampler, own, fanouts, [number, 1]), own, (number, 1), strict=True):
        wanted = sample_neighbors(whole, part, fanouts, key, backend="reference")
        assert all(torch.equal(a, b) for a, b in zip(sample[:3], wanted[:3], strict=True))


def test_a_table_of_nodes_is_used_if_it_fits_the_cache_and_the_words_do_not():
    sampler = make_sampler(GRAPHS["random"])
    for l2_bytes, parts, hashed in ((479, 1, True), (480, 1, False), (95, 1, False), (480, 2, True)):
        sampler.l2_bytes = l2_bytes
        batch = Batch(sampler, torch.tensor([1]), [2], 0, False, False, 0, parts)
        assert batch.hashed == hashed  # 3 positions: 96 bytes; 60 nodes: 480 bytes for each mini-batch


@pytest.mark.medium
@pytest.mark.parametrize("mode", USED)
def test_scratch_memory_is_what_the_documentation_says(mode):
    graph, seeds, fanouts = GRAPHS["random"], [1, 2, 3], [4, 3]
    sampler = make_sampler(graph, mode=mode)
    sampler.sample(torch.tensor(seeds), fanouts, 1)
    held = sampler.scratch_bytes
    num_nodes, capacity = len(graph[0]) - 1, 3 + 12 + 36
    expected = (8 * num_nodes) + 12 * capacity + 8 * capacity
    if mode in QUEUE_MODES:
        expected += 4 * num_nodes + (8 + 8 * 5) * (3 + 12)  # compiled for a fanout of 5
    fixed = (192 + 96 + 4) * 8 + 4  # two tiles
    assert held == expected + fixed
    sampler.sample(torch.tensor(seeds[:2]), fanouts, 2)
    assert sampler.scratch_bytes == held


@pytest.mark.medium
@pytest.mark.parametrize("mode", USED)
def test_one_host_synchronisation_per_batch(mode, monkeypatch, record_calls):
    sampler = make_sampler(GRAPHS["random"], mode=mode)
    reads = record_calls(module.AsyncHostCopy, "array")
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    sampler.sample(torch.tensor([1, 2]), [3, 2, 2], 1)
    assert len(reads) == 1


@pytest.mark.medium
@pytest.mark.parametrize("mode", ["fused", "persistent"])
def test_words_are_cleared_when_the_stamps_run_out(mode):
    graph = GRAPHS["random"]
    sampler = make_sampler(graph, mode=mode)
    sampler._stamp = 3
    for key in range(4):
        assert_equal_to_reference(sampler, graph, [key, 5], [3, 2], key, disjoint=key == 3)
    assert sampler._stamp > 1000


@pytest.mark.medium
@pytest.mark.parametrize("mode", MODES)
def test_no_seeds(mode):
    out = make_sampler(GRAPHS["random"], mode=mode).sample(torch.empty(0, dtype=torch.int64), [3, 2], 1, disjoint=True)
    assert [tuple(ids.shape) for ids in out[:4]] == [(0,), (2, 0), (0,), (0,)]
    assert out[4:] == ([0, 0, 0], [0, 0])
    empty = make_sampler(([0], []), mode=mode).sample(torch.empty(0, dtype=torch.int64), [3], 1)
    assert empty[3] is None
    assert empty[4:] == ([0, 0], [0])


class AccessWatch:
    """Raises on every access of the interpreter outside the allowed tensors."""

    def __init__(self, monkeypatch):
        self.ranges = []
        self.accesses = 0
        builder = interpreter.InterpreterBuilder
        for name, mask_at in (
            ("create_load", None),
            ("create_store", None),
            ("create_masked_load", 1),
            ("create_masked_store", 2),
            ("create_atomic_rmw", 3),
            ("create_atomic_cas", None),
        ):
            original = getattr(builder, name)
            pointer_at = 1 if name == "create_atomic_rmw" else 0
            monkeypatch.setattr(builder, name, self.checked(original, name, pointer_at, mask_at))

    def checked(self, original, name, pointer_at, mask_at):
        def call(builder, *args):
            pointer = args[pointer_at]
            addresses = np.atleast_1d(pointer.data).astype(np.uint64)
            if mask_at is not None and args[mask_at] is not None:
                addresses = addresses[np.broadcast_to(np.atleast_1d(args[mask_at].data), addresses.shape).astype(bool)]
            size = max(pointer.dtype.scalar.element_ty.primitive_bitwidth // 8, 1)
            inside = np.zeros(addresses.shape, bool)
            for low, high in self.ranges:
                inside |= (addresses >= low) & (addresses + np.uint64(size) <= high)
            assert inside.all(), f"{name} out of bounds"
            self.accesses += addresses.size
            return original(builder, *args)

        return call

    def allow(self, tensor):
        low = tensor.data_ptr()
        self.ranges.append((low, low + tensor.numel() * tensor.element_size()))
        return tensor


class WatchedSampler(BaselineSampler):
    """Allocates scratch memory that the watch allows, filled with garbage."""

    def _allocate(self, size, dtype):
        return self.watch.allow(torch.full((size,), -7, dtype=dtype))


def sample_in_bounds(name, mode, monkeypatch, deal=None):
    """Sample under a watch; ``deal`` is the number of GPUs and the logarithm of consecutive rows on one GPU."""
    watch = AccessWatch(monkeypatch)
    indptr, indices = GRAPHS[name]
    indptr, indices, shards = watch.allow(torch.tensor(indptr)), torch.tensor(indices, dtype=torch.int32), None
    if deal is None:
        local = watch.allow(indices)
    else:
        shards = shard_table(indices.view(-1, 1), *deal, place=watch.allow)
        watch.allow(shards.addresses)
        local = shards.local.view(-1)
    every = mode == "every_hop"
    options = {"mode": "fused" if every else mode, "fetch_size": 5, "num_warps": 1, "num_programs": 2}
    options["every_hop"] = every
    sampler = WatchedSampler(indptr, local, shards=shards, **options)
    sampler.watch = watch
    sampler._start_capacity = 1
    last = indptr.numel() - 2
    for seeds, fanouts, tree in (
        ([last], [4, 2, 2], False),
        ([last, 0, 0], [-1, 3], True),
        ([0, 0, 1], [-1, 2, 2], False),
    ):
        seeds, disjoint = watch.allow(torch.tensor(seeds)), tree and not every
        rule = {"disjoint": disjoint, "every_hop": every, "backend": "reference"}
        wanted = sample_neighbors(CSCGraph(indptr, indices), seeds, fanouts, 3, **rule)
        out = sampler.sample(seeds, fanouts, 3, disjoint=disjoint)
        assert torch.equal(out[1], wanted.edge_index)
        assert torch.equal(out[0], wanted.node)
    assert watch.accesses > 100


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*USED, "every_hop"])
@pytest.mark.parametrize("name", ["random", "star in", "no edges"])
def test_no_access_out_of_bounds(name, mode, monkeypatch):
    sample_in_bounds(name, mode, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "deal"), [("fused", (3, 0)), ("fused", (3, 4)), ("persistent", (3, 4))], ids=str)
def test_lists_dealt_out_to_gpus_are_read_in_bounds(mode, deal, monkeypatch):
    sample_in_bounds("random", mode, monkeypatch, deal)


@pytest.mark.slow
def test_the_watch_sees_a_list_that_is_looked_for_on_another_gpu(monkeypatch):
    """One GPU uses another number of consecutive rows than the others."""
    dealt = sampling_cases.shard_table

    def crooked(*arguments, **options):
        shards = dealt(*arguments, **options)
        return dataclasses.replace(shards, layout=dataclasses.replace(shards.layout, shift=5))

    monkeypatch.setattr(sys.modules[__name__], "shard_table", crooked)
    with pytest.raises(Exception, match="out of bounds"):
        sample_in_bounds("random", "fused", monkeypatch, (3, 0))


class AllowingTorch:
    """Replaces ``torch`` in the sampler, so that the watch allows output tensors."""

    def __init__(self, watch):
        self.watch = watch

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *args, **kwargs):
        return self.watch.allow(torch.empty(*args, **kwargs))


def test_the_watch_sees_an_access_out_of_bounds(monkeypatch):
    watch = AccessWatch(monkeypatch)
    sampler = make_sampler(GRAPHS["random"])
    with pytest.raises(Exception, match="out of bounds"):
        sampler.sample(torch.tensor([1]), [2], 1)
    assert watch.accesses == 0


def test_which_fanouts_the_queue_takes():
    assert all(queue_supports(fanouts) for fanouts in ([3], [3, 3, 2], [-1, -1, 4], [15, 0]))
    assert not any(queue_supports(fanouts) for fanouts in ([2, 3], [3, -1], [16, 2], [0, 1]))


@pytest.mark.slow
def test_racing_programs_give_the_same_samples():
    """Each program of a launch is a process: real races through the queue and the grid barrier."""
    script = Path(__file__).with_name("race.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 13


def test_too_many_hops_are_refused():
    sampler = TritonNeighborSampler(torch.tensor([0, 0]), torch.empty(0, dtype=torch.int32))
    with pytest.raises(ValueError, match="31 hops"):
        sampler.sample(torch.tensor([0]), [1] * 31, 1)

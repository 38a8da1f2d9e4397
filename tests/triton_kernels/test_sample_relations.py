"""Kernels for node types, times, weights and LABOR: memory, stamps and ties; tests/ops compares their samples."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")
import triton
import triton.language as tl  # noqa: F401 (Triton's interpreter needs it)

from lightning_gnn.graph import HeteroCSCGraph
from lightning_gnn.ops import Labor, sample_hetero_neighbors, sample_neighbors
from lightning_gnn.ops.sample import reference
from lightning_gnn.ops.sample import triton as operator
from lightning_gnn.triton_kernels import relation_picks, sample_relations
from lightning_gnn.triton_kernels import sample as module
from lightning_gnn.triton_kernels.relation_picks import variate
from lightning_gnn.triton_kernels.sample_relations import Picking, TritonRelationSampler
from tests.batch_checks import assert_equal
from tests.ops.sample_cases import long_lists, random_types
from tests.ops.test_sample_equal import compare, narrow
from tests.triton_kernels.test_sample import AccessWatch, AllowingTorch

pytestmark = pytest.mark.skipif(not module.INTERPRETED, reason="kernels are compiled here; the cuda tests check them")
CPU = torch.device("cpu")


SHIFT = 0


@triton.jit
def coarse(key, source, earlier, often, batch):
    return variate(key, source, earlier, often, batch) >> SHIFT


@pytest.mark.slow
@pytest.mark.parametrize("bits", [1, 4])
def test_of_equal_variates_the_first_count(bits, monkeypatch):
    exact = reference.variate
    monkeypatch.setitem(globals(), "SHIFT", 64 - bits)
    monkeypatch.setattr(relation_picks, "variate", coarse)
    monkeypatch.setattr(reference, "variate", lambda *arguments: exact(*arguments) >> SHIFT)
    for fanout in (5, 40):
        compare("triton", long_lists(2, 70, 1), torch.arange(2), [fanout], 4, labor=Labor())


GRAPH = random_types({"a": 12, "b": 9}, 40, ("ab", "ba"))
SEEDS = {"b": torch.tensor([1, 5, 1]), "a": torch.tensor([2])}


def sample_by_kernels(*args, graph=GRAPH, **options):
    """Sample with the kernels and compare with the reference; return the sampler."""
    expected = sample_hetero_neighbors(graph, SEEDS, *args, backend="reference", **options)
    assert_equal(sample_hetero_neighbors(graph, SEEDS, *args, backend="triton", **options), expected)
    return operator._relation_samplers[graph][CPU]


@pytest.mark.slow
@pytest.mark.parametrize("disjoint", [False, True])
def test_grows_when_a_batch_does_not_fit(disjoint):
    narrow(GRAPH, 1)._start_capacity = 9
    held = sample_by_kernels([-1, 3], 5, disjoint=disjoint).scratch_bytes
    assert sample_by_kernels([-1, 3], 5, disjoint=disjoint).scratch_bytes == held


@pytest.mark.slow
def test_words_are_cleared_when_the_stamps_run_out():
    narrow(GRAPH, 1)._stamp = 2
    for key in range(3):
        sampler = sample_by_kernels([2], key)
    assert sampler._stamp > 1000


@pytest.mark.medium
def test_one_host_synchronisation_per_batch(record_calls):
    reads = record_calls(module.AsyncHostCopy, "array")
    narrow(GRAPH, 1)
    sample_hetero_neighbors(GRAPH, SEEDS, [2, 1], 3, backend="triton")
    assert len(reads) == 1


class WatchedSampler(TritonRelationSampler):
    """Allocates scratch memory that the watch allows, filled with garbage."""

    def _allocate(self, size, dtype):
        return self.watch.allow(torch.full((size,), -7, dtype=dtype))


class AllowingAllTorch(AllowingTorch):
    """Replaces ``torch`` also where arrays come from the host."""

    def tensor(self, *args, **kwargs):
        return self.watch.allow(torch.tensor(*args, **kwargs))

    def from_numpy(self, array):
        return self.watch.allow(torch.from_numpy(array))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "time", "weight", "labor"])
def test_no_access_out_of_bounds(kind, monkeypatch):
    generator, graph, options = torch.Generator().manual_seed(2), GRAPH.map_relations(lambda _, part: part), {}
    if kind == "time":
        graph = graph.map_relations(lambda _, part: part.with_time(torch.randint(9, (40,), generator=generator)))
        options = {"seed_time": {"a": torch.tensor([4]), "b": torch.tensor([8, 0, 5])}, "time_window": 4}
    elif kind == "weight":
        graph = graph.map_relations(lambda _, part: part.with_weight(torch.rand(40, generator=generator)))
    elif kind == "labor":
        options = {"labor": Labor()}
    cases = ([3, 2], False), ([2, -1], True)
    wanted = [
        sample_hetero_neighbors(graph, SEEDS, hops, 3, disjoint=disjoint, backend="reference", **options)
        for hops, disjoint in cases
    ]
    watch = AccessWatch(monkeypatch)
    for part in graph.relations.values():
        for tensor in (*vars(part).values(), part.parallel if kind == "labor" else None):
            if isinstance(tensor, torch.Tensor):
                watch.allow(tensor)
    sampler = narrow(graph, 2 if kind == "plain" else 1, WatchedSampler)
    sampler.watch, sampler._start_capacity = watch, 5
    monkeypatch.setattr(sample_relations, "torch", AllowingAllTorch(watch))
    monkeypatch.setattr(operator, "torch", AllowingAllTorch(watch))
    for expected, (hops, disjoint) in zip(wanted, cases, strict=True):
        out = sample_hetero_neighbors(graph, SEEDS, hops, 3, disjoint=disjoint, backend="triton", **options)
        assert_equal(out, expected)
    assert watch.accesses > 100


def test_too_many_stages_are_refused():
    graph = long_lists(2, 3, 0)
    with pytest.raises(ValueError, match="specify 31 hops, but this sampler supports at most 30"):
        sample_neighbors(graph, torch.tensor([0]), [0] * 31, labor=Labor(), backend="triton")


def test_a_sampler_of_no_types():
    sampler = TritonRelationSampler([], CPU, num_programs=1, num_warps=1)
    assert sampler.sample([], [], [], [], Picking()) == ([], [], [], [], [], [])


class CountingSampler(TritonRelationSampler):
    """Counts the phases of its launches, which grid barriers separate on a GPU."""

    def split_phases(self, *launch):
        self.phases = super().split_phases(*launch)
        return self.phases


@pytest.mark.slow
@pytest.mark.parametrize(("copies", "fanouts"), [(1, [2, 1, 3]), (13, [2])])
def test_the_number_of_phases_depends_on_the_hops_only(copies, fanouts):
    # 39 edge types are more than a tile has threads; type c is the source of none.
    graph = random_types({"a": 12, "b": 9, "c": 5}, 6, ("ab", "ba", "ac"))
    relations = {(s, f"{i}", t): part for (s, _, t), part in graph.relations.items() for i in range(copies)}
    graph = HeteroCSCGraph.build(graph.sizes, relations)
    sampler = narrow(graph, 2, CountingSampler)
    sample_by_kernels(fanouts, 5, graph=graph)
    assert len(sampler.phases) == 1 + 3 * len(fanouts)

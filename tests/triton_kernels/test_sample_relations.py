"""Graphs with types, times and weights, and LABOR, by the kernels: bit for bit what the reference samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists on Linux only")
import triton
import triton.language as tl  # noqa: F401 (Triton's interpreter asks for it)

from lightning_gnn.graph import CSCGraph, HeteroCSCGraph
from lightning_gnn.ops import Labor, sample_hetero_neighbors, sample_neighbors
from lightning_gnn.ops.sample import reference
from lightning_gnn.ops.sample import triton as operator
from lightning_gnn.triton_kernels import relation_picks, sample_relations
from lightning_gnn.triton_kernels import sample as module
from lightning_gnn.triton_kernels.relation_picks import variate
from lightning_gnn.triton_kernels.sample_relations import Picking, TritonRelationSampler
from tests.campaigns import drawn
from tests.ops.test_sample_types import assert_equal, labors, times_of
from tests.strategies import graphs, keys, seeds_of, typed_graphs, typed_seeds
from tests.triton_kernels.test_sample import Allowing, Watched

pytestmark = pytest.mark.skipif(not module.INTERPRETED, reason="kernels are compiled here; the cuda tests check them")
CPU = torch.device("cpu")
few = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 5]), min_size=1, max_size=2)


def sampler_for(graph, num_programs=1, kind=TritonRelationSampler):
    """Make the sampler of a graph, of fewer and narrower programs than by default."""
    sizes = list(graph.sizes.values()) if isinstance(graph, HeteroCSCGraph) else [graph.num_nodes]
    sampler = kind(sizes, CPU, num_programs=num_programs, num_warps=1)
    operator._relation_samplers.setdefault(graph, {})[CPU] = sampler
    return sampler


def compare(graph, seeds, hops, key, num_programs=1, **options):
    """Compare a sample with the reference, exactly."""
    sampler_for(graph, num_programs)
    sample = sample_hetero_neighbors if isinstance(graph, HeteroCSCGraph) else sample_neighbors
    expected = sample(graph, seeds, hops, key, backend="reference", **options)
    assert_equal(sample(graph, seeds, hops, key, backend="triton", **options), expected)
    return expected


def hops_for(data, graph):
    """One list, or one for each edge type."""
    if not graph.relations or data.draw(st.booleans()):
        return data.draw(few)
    hops = data.draw(st.integers(1, 2))
    one = st.lists(st.sampled_from([-1, 0, 1, 2, 5]), min_size=hops, max_size=hops)
    return {name: data.draw(one) for name in graph.relations}


programs = st.sampled_from([1, 3])


@pytest.mark.slow
@drawn(48)
@given(st.data(), typed_graphs(), keys, st.booleans(), st.booleans(), programs)
def test_types_equal_the_reference(data, graph, key, replace, disjoint, num_programs):
    seeds, hops = data.draw(typed_seeds(graph)), hops_for(data, graph)
    first = data.draw(st.sampled_from([0, 977]))
    compare(graph, seeds, hops, key, num_programs, replace=replace, disjoint=disjoint, first_tree=first)


@pytest.mark.slow
@drawn(48)
@given(st.data(), typed_graphs(temporal=True), keys, st.booleans(), st.sampled_from(["uniform", "last"]), programs)
def test_times_equal_the_reference(data, graph, key, replace, strategy, num_programs):
    seeds, hops = data.draw(typed_seeds(graph)), hops_for(data, graph)
    options = {"replace": replace, "temporal_strategy": strategy, "first_tree": data.draw(st.sampled_from([0, 977]))}
    if graph.is_temporal:
        options["seed_time"] = times_of(data, seeds)
        options["time_window"] = data.draw(st.sampled_from([None, 1, 4]))
    compare(graph, seeds, hops, key, num_programs, **options)


@pytest.mark.slow
@drawn(32)
@given(st.data(), typed_graphs(weighted=True), keys, st.booleans(), st.booleans(), programs)
def test_weights_equal_the_reference(data, graph, key, replace, disjoint, num_programs):
    seeds, hops = data.draw(typed_seeds(graph)), hops_for(data, graph)
    compare(graph, seeds, hops, key, num_programs, replace=replace, disjoint=disjoint)


@pytest.mark.slow
@drawn(48)
@given(st.data(), typed_graphs(temporal=True), keys, st.booleans(), labors, programs)
def test_labor_equals_the_reference(data, graph, key, disjoint, labor, num_programs):
    seeds, hops = data.draw(typed_seeds(graph)), hops_for(data, graph)
    options = {"disjoint": disjoint, "labor": labor}
    if graph.is_temporal:
        options["seed_time"] = times_of(data, seeds)
    compare(graph, seeds, hops, key, num_programs, **options)


@pytest.mark.slow
@drawn(32)
@given(st.data(), graphs(), few, keys, st.sampled_from(["time", "weight", "labor"]), programs)
def test_graphs_of_one_type_equal_the_reference(data, graph, hops, key, kind, num_programs):
    generator = torch.Generator().manual_seed(3)
    seeds, options = data.draw(seeds_of(graph.num_nodes)), {}
    if kind == "time":
        graph = graph.with_time(torch.randint(9, (graph.num_edges,), generator=generator))
        options["seed_time"] = torch.randint(9, seeds.shape, generator=generator)
    elif kind == "weight":
        graph = graph.with_weight(torch.rand(graph.num_edges, generator=generator))
    else:
        options["labor"] = Labor()
    compare(graph, seeds, hops, key, num_programs, **options)


def lists(count, length, seed, dtype=torch.int32):
    """A graph of some nodes with long lists."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(50, (count * length,), generator=generator).to(dtype)
    ends = torch.arange(51).clamp(max=count) * length
    return CSCGraph.from_csc(ends, indices)


@pytest.mark.slow
@pytest.mark.parametrize(("fanout", "replace"), [(1, False), (6, False), (15, True)])
def test_weights_of_long_lists(fanout, replace):
    # A few edges have nearly all of the weight, so that most picks come out of what is left.
    generator = torch.Generator().manual_seed(fanout)
    weight = 10.0 ** (24 * torch.rand(4 * 20, generator=generator, dtype=torch.float64) - 12)
    graph = lists(4, 20, fanout).with_weight(weight)
    expected = compare(graph, torch.arange(5), [fanout], 3, replace=replace)
    if not replace:
        assert all(part.unique().numel() == fanout for part in expected.edge.view(4, -1))


@pytest.mark.slow
@pytest.mark.parametrize(("fanout", "often"), [(1, 3), (7, 1), (66, 3), (299, 1)])
def test_labor_on_long_lists(fanout, often):
    # Several tiles of edges, and sources that come more than once.
    graph = lists(3, 300, fanout, torch.int64)
    assert graph.parallel is not None
    compare(graph, torch.arange(4), [fanout], -9, labor=Labor(batch_dependency=often, batch=5))


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
        compare(lists(2, 70, 1), torch.arange(2), [fanout], 4, labor=Labor())


def small_graph():
    generator = torch.Generator().manual_seed(0)
    sizes = {"a": 12, "b": 9}
    relations = {
        (s, "x", t): CSCGraph.from_edge_index(
            torch.stack([torch.randint(sizes[k], (40,), generator=generator) for k in (s, t)]), sizes[t], sizes[s]
        )
        for s, t in ("ab", "ba")
    }
    return HeteroCSCGraph.build(sizes, relations)


SEEDS = {"b": torch.tensor([1, 5, 1]), "a": torch.tensor([2])}


@pytest.mark.slow
@pytest.mark.parametrize("disjoint", [False, True])
def test_grows_when_a_batch_does_not_fit(disjoint):
    graph = small_graph()
    expected = sample_hetero_neighbors(graph, SEEDS, [-1, 3], 5, disjoint=disjoint, backend="reference")
    sampler = sampler_for(graph)
    sampler._start = 9
    assert_equal(sample_hetero_neighbors(graph, SEEDS, [-1, 3], 5, disjoint=disjoint, backend="triton"), expected)
    held = sampler.scratch_bytes
    assert_equal(sample_hetero_neighbors(graph, SEEDS, [-1, 3], 5, disjoint=disjoint, backend="triton"), expected)
    assert sampler.scratch_bytes == held


@pytest.mark.slow
def test_words_are_cleared_when_the_stamps_run_out():
    graph = small_graph()
    sampler = sampler_for(graph)
    sampler._stamp = 2
    for key in range(3):
        expected = sample_hetero_neighbors(graph, SEEDS, [2], key, backend="reference")
        assert_equal(sample_hetero_neighbors(graph, SEEDS, [2], key, backend="triton"), expected)
    assert sampler._stamp > 1000


def test_one_host_synchronisation_per_batch(monkeypatch):
    graph, reads, original = small_graph(), [], torch.Tensor.tolist
    sampler_for(graph)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (reads.append(self), original(self))[1])
    sample_hetero_neighbors(graph, SEEDS, [2, 1], 3, backend="triton")
    assert len(reads) == 1


class WatchedSampler(TritonRelationSampler):
    """Allocates scratch memory that the watch knows, with rubbish in it."""

    def _allocate(self, size, dtype):
        return self.watch.allow(torch.full((size,), -7, dtype=dtype))


class AllowingAll(Allowing):
    """Stands in for ``torch`` where arrays come from the host, too."""

    def tensor(self, *args, **kwargs):
        return self.watch.allow(torch.tensor(*args, **kwargs))

    def from_numpy(self, array):
        return self.watch.allow(torch.from_numpy(array))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "time", "weight", "labor"])
def test_no_access_out_of_bounds(kind, monkeypatch):
    generator, graph, options = torch.Generator().manual_seed(2), small_graph(), {}
    if kind == "time":
        graph = graph.map_relations(lambda _, part: part.with_time(torch.randint(9, (40,), generator=generator)))
        options = {"seed_time": {"a": torch.tensor([4]), "b": torch.tensor([8, 0, 5])}, "time_window": 4}
    elif kind == "weight":
        graph = graph.map_relations(lambda _, part: part.with_weight(torch.rand(40, generator=generator)))
    elif kind == "labor":
        options = {"labor": Labor()}
    wanted = [
        sample_hetero_neighbors(graph, SEEDS, hops, 3, disjoint=disjoint, backend="reference", **options)
        for hops, disjoint in (([3, 2], False), ([2, -1], True))
    ]
    watch = Watched(monkeypatch)
    for part in graph.relations.values():
        for tensor in (*vars(part).values(), part.parallel if kind == "labor" else None):
            if isinstance(tensor, torch.Tensor):
                watch.allow(tensor)
    sampler = sampler_for(graph, 2 if kind == "plain" else 1, WatchedSampler)
    sampler.watch = watch
    sampler._start = 5
    monkeypatch.setattr(sample_relations, "torch", AllowingAll(watch))
    monkeypatch.setattr(operator, "torch", AllowingAll(watch))
    for expected, (hops, disjoint) in zip(wanted, (([3, 2], False), ([2, -1], True)), strict=True):
        out = sample_hetero_neighbors(graph, SEEDS, hops, 3, disjoint=disjoint, backend="triton", **options)
        assert_equal(out, expected)
    assert watch.accesses > 100


def test_too_many_stages_are_refused():
    graph = lists(2, 3, 0)
    with pytest.raises(ValueError, match="there are 2047 hops of 1 edge types, but this sampler does at most 2046"):
        sample_neighbors(graph, torch.tensor([0]), [0] * 2047, labor=Labor(), backend="triton")


def test_nothing_to_sample():
    empty = HeteroCSCGraph.build({"a": 0, "b": 3}, {})
    compare(empty, {"b": torch.tensor([2, 2])}, [2], 1)
    compare(small_graph(), {}, [2, 1], 1)
    sampler = TritonRelationSampler([], CPU, num_programs=1, num_warps=1)
    assert sampler.sample([], [], [], [], Picking()) == ([], [], [], [], [], [])

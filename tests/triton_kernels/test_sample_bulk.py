"""Mini-batches that share a launch equal those sampled separately, bit for bit."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists on Linux only")

from lightning_gnn.graph import CSCGraph
from lightning_gnn.ops import sample_neighbors
from lightning_gnn.triton_kernels import sample as module
from lightning_gnn.triton_kernels import sample_bulk as bulk_module
from lightning_gnn.triton_kernels.sample import TritonNeighborSampler
from lightning_gnn.triton_kernels.sample_bulk import most_batches, sample_bulk
from tests.strategies import graphs
from tests.triton_kernels.sampling_cases import GRAPHS
from tests.triton_kernels.test_sample import AccessWatch, WatchedSampler, make_sampler

pytestmark = pytest.mark.skipif(not module.INTERPRETED, reason="kernels are compiled here; the cuda tests check them")


def assert_bulk_equals_reference(sampler, seeds, fanouts, keys, replace=False):
    indptr, indices = sampler.graph[:2]
    made = sample_bulk(sampler, seeds, fanouts, keys, replace)
    assert len(made) == len(seeds)
    for sample, own, key in zip(made, seeds, keys, strict=True):
        graph = CSCGraph(indptr, indices)
        wanted = sample_neighbors(graph, own, fanouts, key, replace=replace, backend="reference")
        for ours, theirs in zip(sample[:3], wanted[:3], strict=True):
            assert ours.dtype == torch.int64
            assert torch.equal(ours, theirs)
        assert sample[3] is None
        assert (list(sample[4]), list(sample[5])) == (list(wanted[4]), list(wanted[5]))


@pytest.mark.slow
@settings(max_examples=12)
@given(
    graph=graphs(max_nodes=12, max_edges=40),
    sizes=st.lists(st.integers(0, 4), min_size=2, max_size=4),
    fanouts=st.lists(st.sampled_from([-1, 0, 1, 3, 40]), min_size=1, max_size=2),
    programs=st.sampled_from([1, 3]),
    replace=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_bulk_equals_the_reference(graph, sizes, fanouts, programs, replace, seed):
    generator = torch.Generator().manual_seed(seed)
    seeds = [torch.randint(graph.num_nodes, (size,), generator=generator) for size in sizes]
    keys = torch.randint(-(2**62), 2**62, (len(sizes),), generator=generator).tolist()
    sampler = TritonNeighborSampler(graph.indptr, graph.indices, num_programs=programs, num_warps=1)
    assert_bulk_equals_reference(sampler, seeds, fanouts, keys, replace)


SEEDS = [torch.tensor(own) for own in ([3, 0, 40], [7], [59, 59, 3, 2])]


@pytest.mark.medium
def test_a_bulk_equals_the_reference_also_where_it_does_not_fit_at_first():
    sampler = make_sampler(GRAPHS["random"], num_programs=3)
    sampler._start_capacity = 1
    assert_bulk_equals_reference(sampler, SEEDS, [4, 3], [5, -(2**63), 2**63 - 1])


@pytest.mark.slow
def test_hot_lists_are_read_in_a_bulk_too():
    graph = CSCGraph(*(torch.tensor(array) for array in GRAPHS["random"]))
    hot = graph.cache_adjacency(torch.tensor([0, 3, 7, 30]), torch.device("cpu"))
    sampler = TritonNeighborSampler(graph.indptr, graph.indices, num_programs=2, num_warps=1, cached=hot)
    assert_bulk_equals_reference(sampler, SEEDS, [4, -1], [1, 2, 3])


@pytest.mark.medium
def test_one_host_synchronisation_for_all(monkeypatch, record_calls):
    sampler = make_sampler(GRAPHS["path"])
    reads = record_calls(module.AsyncHostCopy, "array")
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    sample_bulk(sampler, [torch.tensor([1]), torch.tensor([2])], [1], [1, 2])
    assert len(reads) == 1


@pytest.mark.medium
def test_a_mini_batch_that_is_pickled_does_not_contain_the_others():
    made = sample_bulk(make_sampler(GRAPHS["path"]), [torch.tensor([1, 2, 3])] * 3, [1, 1], [1, 2, 3])
    assert len({sample[0].untyped_storage().data_ptr() for sample in made}) == 3
    for sample in made:
        assert all(out.data_ptr() % 16 == 0 and out.is_contiguous() for out in sample[:3])
        entries = sum(out.numel() for out in sample[:3])
        assert all(8 * entries <= out.untyped_storage().nbytes() <= 8 * entries + 16 for out in sample[:3])
        assert all(torch.equal(pickle.loads(pickle.dumps(out)), out) for out in sample[:3])


@pytest.mark.slow
def test_what_does_not_fit_into_31_bits_is_sampled_in_parts(monkeypatch):
    sampler = make_sampler(GRAPHS["path"])
    assert most_batches(sampler) == 32
    assert most_batches(make_sampler(GRAPHS["path"], mode="persistent")) == 1
    monkeypatch.setattr(bulk_module, "LARGEST", 90)  # nodes: two mini-batches of 40 each
    assert most_batches(sampler) == 2
    monkeypatch.setattr(module, "LARGEST", 3)  # edge positions per launch: those of one
    assert_bulk_equals_reference(sampler, [torch.tensor([own]) for own in (1, 2, 3)], [1, 1], [4, 5, 6])
    with pytest.raises(ValueError, match="has at least 4 edges; the limit is 3"):
        sample_bulk(sampler, [torch.tensor([own]) for own in (1, 2)], [1, 1, 1], [4, 5])


@pytest.mark.slow
def test_no_access_out_of_bounds(monkeypatch):
    watch = AccessWatch(monkeypatch)
    indptr, indices = GRAPHS["random"]
    indptr, indices = watch.allow(torch.tensor(indptr)), watch.allow(torch.tensor(indices, dtype=torch.int32))
    sampler = WatchedSampler(indptr, indices, num_warps=1, num_programs=2)
    sampler.watch = watch
    sampler._start_capacity = 1
    joined = bulk_module.joined
    monkeypatch.setattr(bulk_module, "joined", lambda own, seeds, *args: joined(own, watch.allow(seeds), *args))
    last = indptr.numel() - 2
    assert_bulk_equals_reference(sampler, [torch.tensor([last]), torch.tensor([0, 0])], [2, 2], [1, 2])
    assert watch.accesses > 100

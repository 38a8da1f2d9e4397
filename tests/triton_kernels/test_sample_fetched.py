"""Samples whose sources the host fetches between two launches of a hop are those of one launch for all hops."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from lightning_gnn.graph import CSCGraph
from lightning_gnn.ops import sample_neighbors
from lightning_gnn.triton_kernels import sample as module
from lightning_gnn.triton_kernels import sample_bulk as bulk_module
from lightning_gnn.triton_kernels.sample_bulk import sample_bulk
from lightning_gnn.triton_kernels.sample_fetched import FetchingSampler
from tests.triton_kernels.sampling_cases import GRAPHS, assert_equal_to_reference
from tests.triton_kernels.test_sample import Allowing, Watched
from tests.triton_kernels.test_sample_bulk import AllowingMore

pytestmark = pytest.mark.skipif(not module.INTERPRETED, reason="kernels are compiled here; the cuda tests check them")


class WatchedFetching(FetchingSampler):
    """Its memory is what the watch knows, with rubbish in it, and so are the seeds of one mini-batch."""

    def _allocate(self, size, dtype):
        return self.watch.allow(torch.full((size,), -7, dtype=dtype))

    def _batch(self, seeds, *options):
        return super()._batch(self.watch.allow(seeds), *options)


@pytest.fixture(params=["random", "star in", "no edges"])
def fetching(request, monkeypatch):
    """A sampler under a watch, its graph, and how many sources it has fetched each time."""
    watch, fetches = Watched(monkeypatch), []
    indptr, indices = (torch.tensor(array, dtype=torch.int64) for array in GRAPHS[request.param])

    def fetch(edges):
        fetches.append(edges.numel())
        return indices[edges].int()

    options = {"num_programs": 2, "num_warps": 1}
    sampler = WatchedFetching(watch.allow(indptr), indices.numel(), fetch, torch.device("cpu"), **options)
    sampler.watch = watch
    monkeypatch.setattr(module, "torch", Allowing(watch))
    monkeypatch.setattr(bulk_module, "torch", AllowingMore(watch))
    return sampler, GRAPHS[request.param], fetches


@pytest.mark.slow
def test_a_mini_batch_equals_the_reference_in_bounds(fetching):
    sampler, graph, fetches = fetching
    last = len(graph[0]) - 2
    for seeds, fanouts, options in (
        ([last, 0, 0, 1], [4, 2], {}),
        ([0, last], [3, 40], {"replace": True}),
        ([last, 0, 0], [-1, 3], {"disjoint": True, "first_tree": 7}),
        ([], [4, 2], {}),
    ):
        assert_equal_to_reference(sampler, graph, seeds, fanouts, 11, **options)
        assert len(fetches) == 2  # once a hop, also for no seeds
        fetches.clear()


@pytest.mark.slow
def test_a_bulk_equals_the_reference_in_bounds(fetching):
    sampler, graph, fetches = fetching
    last = len(graph[0]) - 2
    whole = CSCGraph(*(torch.tensor(array, dtype=torch.int64) for array in graph))
    seeds, keys = [torch.tensor(own, dtype=torch.int64) for own in ([last], [], [0, 0, 1])], [1, 2, 3]
    for fanouts in ([2, 3], [-1]):
        made = sample_bulk(sampler, seeds, fanouts, keys)
        assert len(fetches) == len(fanouts)
        fetches.clear()
        for sample, own, key in zip(made, seeds, keys, strict=True):
            wanted = sample_neighbors(whole, own, fanouts, key, backend="reference")
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(sample[:3], wanted[:3], strict=True))
            assert (list(sample[4]), list(sample[5])) == (list(wanted[4]), list(wanted[5]))

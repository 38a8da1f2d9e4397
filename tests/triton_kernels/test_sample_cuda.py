"""Full-size comparison on a GPU: every mode with the CPU sampler, batch by batch."""

import pytest
import torch

from lightning_gnn.graph import CSCGraph, HeteroCSCGraph
from lightning_gnn.ops import Labor, sample_hetero_neighbors, sample_neighbors

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the interpreter stands in"),
]
NUM_NODES, NUM_EDGES, BATCHES = 1_000_000, 100_000_000, 200


@pytest.fixture(scope="module")
def graph():
    """Graph with power-law in- and out-degrees."""
    generator = torch.Generator().manual_seed(0)
    degree = (1 - torch.rand(NUM_NODES, generator=generator, dtype=torch.float64)) ** (-1 / 1.8)
    degree = (degree / degree.sum() * NUM_EDGES).ceil().long()
    indptr = torch.zeros(NUM_NODES + 1, dtype=torch.int64)
    torch.cumsum(degree, 0, out=indptr[1:])
    num_edges = int(indptr[-1])
    assert num_edges >= NUM_EDGES
    ends = torch.repeat_interleave(torch.arange(NUM_NODES, dtype=torch.int32), degree)
    indices = ends[torch.randint(0, num_edges, (num_edges,), generator=generator)]
    return CSCGraph(indptr, indices)


def compare(graph, sampler, batches, batch_size, fanouts, replace=False, disjoint=False, **rule):
    generator = torch.Generator().manual_seed(1)
    for batch in range(batches):
        seeds = torch.randint(0, graph.num_nodes, (batch_size,), generator=generator)
        out = sampler.sample(seeds.cuda(), fanouts, batch - 50, replace, disjoint, 3 * batch)
        options = {"replace": replace, "disjoint": disjoint, "first_tree": 3 * batch, "backend": "numba", **rule}
        wanted = sample_neighbors(graph, seeds, fanouts, batch - 50, **options)
        for ours, theirs in zip(out[:4], wanted[:4], strict=True):
            assert theirs is None if ours is None else torch.equal(ours.cpu(), theirs), f"batch {batch}"
        assert (list(out[4]), list(out[5])) == (list(wanted[4]), list(wanted[5]))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["fused", "persistent", "no_queue", "hop_by_hop", "launches"])
def test_every_mode_equals_numba(graph, mode):
    from benchmarks.gpu.baselines import BaselineSampler

    sampler = BaselineSampler(graph.indptr.cuda(), graph.indices.cuda(), mode=mode)
    compare(graph, sampler, BATCHES, 1024, [15, 10, 5])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_warps", "programs_per_sm"), [(4, 4), (2, 16), (8, 8)])
def test_every_hop_and_every_shape_of_launch_equal_numba(graph, num_warps, programs_per_sm):
    from lightning_gnn.triton_kernels.sample import TritonNeighborSampler

    shape = {"num_warps": num_warps, "programs_per_sm": programs_per_sm}
    arrays = graph.indptr.cuda(), graph.indices.cuda()
    for mode in ("fused", "persistent"):
        compare(graph, TritonNeighborSampler(*arrays, mode=mode, **shape), 10, 1024, [15, 10, 5])
    every = TritonNeighborSampler(*arrays, every_hop=True, **shape)
    compare(graph, every, 10, 1024, [10, 10, 10], every_hop=True)
    compare(graph, every, 3, 64, [-1, 5], every_hop=True)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fetch_size", [1, 16, 128, 1000])
def test_every_fetch_size_equals_numba(graph, fetch_size):
    from lightning_gnn.triton_kernels.sample import TritonNeighborSampler

    indptr, indices = graph.indptr.cuda(), graph.indices.cuda()
    sampler = TritonNeighborSampler(indptr, indices, mode="persistent", fetch_size=fetch_size)
    compare(graph, sampler, 20, 1024, [10, 10, 10])


@pytest.mark.timeout(1800)
def test_other_fanouts_equal_numba(graph):
    from lightning_gnn.triton_kernels.sample import TritonNeighborSampler

    indptr, indices = graph.indptr.cuda(), graph.indices.cuda().long()
    for mode in ("fused", "persistent"):
        sampler = TritonNeighborSampler(indptr, indices, mode=mode)
        for fanouts in ([-1, 5], [5, 10], [40, 3], [1] * 20, [0]):
            compare(graph, sampler, 5, 512, fanouts)
        compare(graph, sampler, 5, 512, [10, 5], replace=True)
        compare(graph, sampler, 5, 512, [10, 5], disjoint=True)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_batches", [2, 8, 32])
def test_a_bulk_equals_numba(graph, num_batches):
    from lightning_gnn.triton_kernels.sample import TritonNeighborSampler
    from lightning_gnn.triton_kernels.sample_bulk import sample_bulk

    sampler = TritonNeighborSampler(graph.indptr.cuda(), graph.indices.cuda())
    generator = torch.Generator().manual_seed(3)
    for fanouts in ([15, 10, 5], [-1, 5], [40, 3]):
        seeds = [torch.randint(0, graph.num_nodes, (1024 - own,), generator=generator) for own in range(num_batches)]
        keys = list(range(-2, num_batches - 2))
        for out, own, key in zip(sample_bulk(sampler, seeds, fanouts, keys), seeds, keys, strict=True):
            wanted = sample_neighbors(graph, own, fanouts, key, backend="numba")
            assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(out[:3], wanted[:3], strict=True))
            assert (list(out[4]), list(out[5])) == (list(wanted[4]), list(wanted[5]))


@pytest.mark.timeout(1800)
def test_topology_in_pinned_memory_equals_numba(graph):
    from lightning_gnn.triton_kernels.sample import TritonNeighborSampler

    sampler = TritonNeighborSampler(graph.indptr.cuda(), graph.indices.pin_memory())
    compare(graph, sampler, 20, 1024, [15, 10, 5])


@pytest.mark.timeout(1800)
def test_paths_and_stars_end(graph):
    from benchmarks.gpu.baselines import BaselineSampler

    path = CSCGraph(torch.arange(1001).clamp(max=1000), (torch.arange(1000, dtype=torch.int32) + 1).clamp(max=999))
    star = CSCGraph(torch.tensor([0, 100_000] + [100_000] * 100_000), torch.arange(1, 100_001, dtype=torch.int32))
    for small, fanouts in (path, [1] * 30), (star, [20, 20]), (star, [-1, 5]):
        for mode in ("fused", "persistent", "no_queue", "hop_by_hop"):
            sampler = BaselineSampler(small.indptr.cuda(), small.indices.cuda(), mode=mode)
            compare(small, sampler, 20, 1, fanouts)


KINDS = {
    "plain": {},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True, "first_tree": 9},
    "time": {},
    "last": {"temporal_strategy": "last", "time_window": 700},
    "weight": {},
    "weight, replace": {"replace": True},
    "labor": {"labor": Labor()},
    "labor, time": {"labor": Labor(layer_dependency=True, batch_dependency=3, batch=7)},
}


def typed_graph(kind):
    """Graph of three node types with hubs, two edge types between the same node types, and duplicate edges."""
    generator = torch.Generator().manual_seed(2)
    sizes, relations = {"a": 200_000, "b": 50_000, "c": 1000}, {}
    for name in [("a", "x", "a"), ("a", "x", "b"), ("a", "y", "b"), ("b", "x", "a"), ("c", "x", "a"), ("a", "x", "c")]:
        source, target = sizes[name[0]], sizes[name[2]]
        row = torch.randint(source, (2_000_000,), generator=generator)
        col = (target * torch.rand(2_000_000, generator=generator) ** 4).long()
        part = CSCGraph.from_edge_index(torch.stack([row, col]), target, source)
        if "time" in kind or kind == "last":
            part = part.with_time(torch.randint(1000, (2_000_000,), generator=generator))
        elif "weight" in kind and name[1] == "x":
            weight = 10.0 ** (14 * torch.rand(2_000_000, generator=generator, dtype=torch.float64) - 7)
            part = part.with_weight(weight * (weight > 1e-6))
        relations[name] = part
    return HeteroCSCGraph.build(sizes, relations)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", ["device", "pinned"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_samples_equal_numba(kind, place):
    graph = typed_graph(kind)
    there = graph.to("cuda") if place == "device" else graph.pin_memory()
    generator = torch.Generator().manual_seed(1)
    for key in range(20 if place == "device" else 3):
        seeds = {name: torch.randint(graph.sizes[name], (300,), generator=generator) for name in "ba"}
        options = dict(KINDS[kind])
        if graph.is_temporal:
            options["seed_time"] = {name: torch.randint(1100, (300,), generator=generator) for name in seeds}
        for fanouts in ([10, 5], [40, 3]) if key < 3 else ([10, 5],):
            wanted = sample_hetero_neighbors(graph, seeds, fanouts, key, backend="numba", **options)
            made = sample_hetero_neighbors(there, seeds, fanouts, key, backend="triton", **options)
            for ours, theirs in zip(made, wanted, strict=True):
                assert (ours is None) == (theirs is None)
                for name, value in (theirs or {}).items():
                    same = torch.equal(ours[name].cpu(), value) if torch.is_tensor(value) else ours[name] == value
                    assert same, (key, name)

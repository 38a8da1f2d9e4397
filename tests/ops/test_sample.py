import gc
import hashlib
import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.graph import CSCGraph
from lightning_gnn.ops import batch_key, sample_neighbors
from lightning_gnn.ops.hashing import NODE_STEP, draw, node_key
from lightning_gnn.ops.sample import numba as sample_numba
from lightning_gnn.ops.sample.lanes import LANES, draw_lanes
from lightning_gnn.ops.sample.relabel import LAST_STAMP
from tests.batch_checks import assert_equal
from tests.ops.sample_cases import COPIES, check_chi_square, copy_graph, hashing, list_picks
from tests.patience import PATIENCE
from tests.strategies import fanouts, graphs, keys, seeds_of


@pytest.mark.medium
@pytest.mark.campaign
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [1, 2, 5, 15, 16, 33, 64, 65])
def test_many_rows_of_all_degrees(fanout, replace, disjoint):
    # More rows than are drawn at once, more edges than in a block, rows that take all edges among rows that draw.
    degrees = torch.randint(2 * fanout + 3, (700,))
    sources = torch.randint(700, (int(degrees.sum()),))
    graph = CSCGraph.from_edge_index(torch.stack([sources, torch.repeat_interleave(degrees)]), 700)
    seeds, options = torch.randint(700, (300,)), {"replace": replace, "disjoint": disjoint}
    expected = sample_neighbors(graph, seeds, [fanout, 1, -1], 3, backend="reference", **options)
    assert_equal(sample_neighbors(graph, seeds, [fanout, 1, -1], 3, **options), expected)


@given(keys, st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=16), st.integers(1, 64), st.booleans(), st.data())
def test_lanes_draw_what_a_shuffle_of_any_length_does(key, degrees, fanout, replace, data):
    # A sparse shuffle that stores only the touched positions: degrees go up to 2^32 - 1.
    degrees = [degree if replace else max(degree, fanout + data.draw(st.integers(1, 3))) for degree in degrees]
    nodes = [data.draw(st.integers(0, 2**40)) for _ in degrees]
    state, wide = np.zeros(LANES, np.uint64), np.ones(LANES, np.int64)
    wide[: len(degrees)] = degrees
    state[: len(nodes)] = [(key % 2**64) ^ (node * NODE_STEP % 2**64) for node in nodes]
    out = np.zeros((3, LANES * fanout), np.uint32)
    run_lanes(state, wide, fanout, replace, out)
    for lane, (node, degree) in enumerate(zip(nodes, degrees, strict=True)):
        order, stream = {}, node_key(key, node)
        expected = []
        for j in range(fanout):
            r = draw(stream, j, degree) if replace else j + draw(stream, j, degree - j)
            expected.append(r if replace else order.get(r, r))
            order[r] = order.get(j, j)
        assert out[2, lane::LANES].tolist() == expected


@numba.njit
def run_lanes(state, degrees, fanout, replace, out):
    draw_lanes(state, degrees, fanout, replace, out[0], out[1], out[2])


def test_threads_give_the_same_samples():
    graph = CSCGraph.from_edge_index(torch.randint(2000, (2, 60_000)), 2000)
    batches = [(torch.randint(2000, (64,)), key) for key in range(80)]

    def work(task):
        return sample_neighbors(graph, task[0], [10, 5, 5], task[1])

    alone = [work(task) for task in batches]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(work, batches, timeout=PATIENCE))
    for a, b in zip(alone, together, strict=True):
        assert_equal(a, b)


def test_a_thread_survives_the_end_of_the_stamps():
    graph = CSCGraph.from_edge_index(torch.randint(200, (2, 2000)), 200)
    before = sample_neighbors(graph, torch.arange(20), [5, 5], 7)
    sample_numba._scratch.stamp = (1 << (32 - sample_numba._scratch.bits)) - 2
    for _ in range(3):
        assert_equal(sample_neighbors(graph, torch.arange(20), [5, 5], 7), before)
    assert sample_numba._scratch.stamp == 2
    slots = sample_numba._scratch.slots[0]
    slots.stamp = LAST_STAMP - 1
    with hashing():
        for _ in range(3):
            assert_equal(sample_neighbors(graph, torch.arange(20), [5, 5], 7), before)
    assert slots.stamp == 2


def test_stamps_end_in_the_middle_of_a_disjoint_sample():
    graph = CSCGraph.from_edge_index(torch.randint(200, (2, 2000)), 200)
    seeds = torch.randint(200, (20,))
    expected = sample_neighbors(graph, seeds, [5, -1], 7, disjoint=True, backend="reference")
    for left in range(45):
        sample_numba._scratch.slots[0].stamp = LAST_STAMP - left
        assert_equal(sample_neighbors(graph, seeds, [5, -1], 7, disjoint=True), expected)


@pytest.mark.parametrize("first", [1, 3])
def test_entries_of_the_table_widen_in_the_middle_of_a_batch(first):
    graph = CSCGraph.from_edge_index(torch.randint(900, (2, 9000)), 900)
    seeds = torch.randint(900, (first,))
    expected = sample_neighbors(graph, seeds, [4, 4, 4], 7, backend="reference")
    bits = sample_numba._scratch.bits
    try:
        for bits in range(1, 11):
            sample_numba._scratch.bits, sample_numba._scratch.stamp = bits, 0
            sample_numba._scratch.table[:] = 0
            for _ in range(3):
                assert_equal(sample_neighbors(graph, seeds, [4, 4, 4], 7), expected)
    finally:
        sample_numba._scratch.bits, sample_numba._scratch.stamp = bits, 0
        sample_numba._scratch.table[:] = 0


@pytest.mark.parametrize("disjoint", [False, True])
def test_batches_of_all_sizes_after_one_another(disjoint):
    # A thread's estimate of the next batch's size is wrong each time.
    graph = CSCGraph.from_edge_index(torch.randint(900, (2, 30_000)), 900)
    for size, hops in ((300, [9, 9]), (1, [1]), (0, [5]), (200, [1, -1]), (1, [-1, -1, 2]), (30, [0, 3])):
        seeds = torch.randint(900, (size,))
        expected = sample_neighbors(graph, seeds, hops, 5, disjoint=disjoint, backend="reference")
        out = sample_neighbors(graph, seeds, hops, 5, disjoint=disjoint)
        assert_equal(out, expected)
        assert out.edge_index.is_contiguous()
        for part in (out.node, out.edge_index, out.edge, *([out.batch] if disjoint else [])):
            assert part.untyped_storage().nbytes() == part.nbytes  # pickling or sharing it copies no more than that


@pytest.mark.medium
@pytest.mark.parametrize("disjoint", [False, True])
def test_a_batch_that_is_kept_is_not_overwritten(disjoint):
    graph = CSCGraph.from_edge_index(torch.randint(9000, (2, 300_000)), 9000)
    samples = [sample_neighbors(graph, torch.arange(500), [10, 10], key, disjoint=disjoint) for key in range(12)]
    # Retain one tensor of each mini-batch.
    parts = [sample[number % 3] for number, sample in enumerate(samples)]
    del samples
    gc.collect()
    for key in range(12):
        sample_neighbors(graph, torch.arange(500), [10, 10], 100 + key, disjoint=disjoint)
    for number, part in enumerate(parts):
        again = sample_neighbors(graph, torch.arange(500), [10, 10], number, disjoint=disjoint)
        assert torch.equal(part, again[number % 3])


@pytest.mark.parametrize("replace", [False, True])
def test_picks_are_uniform_over_subsets(replace):
    graph, centres = copy_graph(torch.stack([torch.arange(1, 7), torch.zeros(6, dtype=torch.int64)]), 7)
    counts, trials = Counter(), 30_000
    for batch in range(trials // COPIES):
        out = sample_neighbors(graph, centres, [3], batch_key(5, batch=batch), replace=replace)
        counts.update(list_picks(out, 6))  # ordered picks: a stronger test than subsets
    cells = [*(itertools.product(range(6), repeat=3) if replace else itertools.permutations(range(6), 3))]
    check_chi_square(counts, dict.fromkeys(cells, trials / len(cells)))


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 20), keys)
def test_picks_are_subset_stable(degree, few, many, key):
    few, many = sorted((few, many))
    graph = CSCGraph.from_edge_index(torch.zeros(2, degree, dtype=torch.int64), 1)
    a = sample_neighbors(graph, torch.tensor([0]), [few], key).edge.tolist()
    b = sample_neighbors(graph, torch.tensor([0]), [many], key).edge.tolist()
    assert len(set(b)) == len(b) == min(many, degree)
    if degree > many:
        assert b[: len(a)] == a
    else:
        assert set(a) <= set(b)


@given(st.data(), graphs(), fanouts, keys)
def test_a_tree_of_a_disjoint_sample_does_not_depend_on_the_other_seeds(data, graph, fanouts, key):
    seeds = data.draw(seeds_of(graph.num_nodes, max_size=4))
    first = data.draw(st.integers(0, 2**40))
    together = sample_neighbors(graph, seeds, fanouts, key, disjoint=True, first_tree=first)
    for tree, seed in enumerate(seeds):
        alone = sample_neighbors(graph, seed.view(1), fanouts, key, disjoint=True, first_tree=first + tree)
        in_tree = together.batch == tree
        assert torch.equal(together.node[in_tree], alone.node)
        assert torch.equal(together.edge[in_tree[together.edge_index[1]]], alone.edge)


def get_tree(sample, number):
    """Return the nodes and edges of one tree, in global ids."""
    in_tree = sample.batch == number
    edges = in_tree[sample.edge_index[1]]
    return sample.node[in_tree].tolist(), sample.edge[edges].tolist(), sample.node[sample.edge_index[:, edges]].tolist()


@given(st.data(), graphs(), fanouts, keys, st.booleans(), st.sampled_from(["numba", "reference"]))
def test_trees_are_the_same_however_a_batch_is_cut(data, graph, fanouts, key, replace, backend):
    seeds = data.draw(seeds_of(graph.num_nodes, max_size=9))
    options = {"replace": replace, "disjoint": True, "backend": backend}
    whole = sample_neighbors(graph, seeds, fanouts, key, **options)
    cuts = sorted(data.draw(st.lists(st.integers(0, seeds.numel()), max_size=4)))
    for start, stop in itertools.pairwise([0, *cuts, seeds.numel()]):
        part = sample_neighbors(graph, seeds[start:stop], fanouts, key, first_tree=start, **options)
        for number in range(stop - start):
            assert get_tree(part, number) == get_tree(whole, start + number)


@pytest.mark.parametrize("nested", [False, True], ids=["the seed's own picks", "those of a node that both trees reach"])
def test_trees_of_one_seed_are_independent_and_each_uniform(nested):
    degree, trials = 4, 24_000
    source = torch.arange(1, degree + 1) + (1 if nested else 0)
    edges = torch.stack([source, torch.full((degree,), 1 if nested else 0)])
    if nested:  # 0 <- 1 <- the other nodes
        edges = torch.cat([torch.tensor([[1], [0]]), edges], dim=1)
    graph, first = copy_graph(edges, 6)
    joint, twice, hops = Counter(), first.repeat_interleave(2), [1, 1] if nested else [1]
    for batch in range(trials // COPIES):
        out = sample_neighbors(graph, twice, hops, batch_key(2, batch=batch), disjoint=True)
        picks = out.edge[-2 * COPIES :].view(COPIES, 2) - edges.shape[1] * torch.arange(COPIES)[:, None]
        joint.update(map(tuple, picks.tolist()))
    picked = sorted({edge for pair in joint for edge in pair})
    assert len(picked) == degree
    # Independence: all pairs are equally frequent.
    check_chi_square(joint, dict.fromkeys(itertools.product(picked, repeat=2), trials / degree**2))
    for tree in (0, 1):
        counts = Counter({edge: sum(n for pair, n in joint.items() if pair[tree] == edge) for edge in picked})
        check_chi_square(counts, dict.fromkeys(picked, trials / degree))


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize(("replace", "digest"), [(False, "191b8867e404b72a"), (True, "fc40126084767b02")])
def test_batches_that_are_not_disjoint_stay_what_they_have_always_been(backend, replace, digest):
    # Changing this changes every seeded training run of every user.
    generator = torch.Generator().manual_seed(11)
    graph = CSCGraph.from_edge_index(torch.randint(500, (2, 6000), generator=generator), 500)
    found = hashlib.sha256()
    for number, hops in enumerate(([3, 2], [-1, 2], [5, 70, 1], [0, 4])):
        seeds, key = torch.arange(number, 300, 37), batch_key(4, batch=number)
        out = sample_neighbors(graph, seeds, hops, key, replace=replace, backend=backend, first_tree=number)
        for ids in (out.node, out.edge_index, out.edge):
            found.update(ids.numpy().tobytes())
    assert found.hexdigest()[:16] == digest


def test_a_duplicate_seed_keeps_both_places_with_the_same_picks():
    graph = CSCGraph.from_edge_index(torch.stack([torch.arange(1, 20), torch.zeros(19, dtype=torch.int64)]), 20)
    out = sample_neighbors(graph, torch.tensor([0, 0]), [4], 3)
    assert out.node[:2].tolist() == [0, 0]
    assert out.edge[:4].tolist() == out.edge[4:].tolist()
    assert out.edge_index[1].tolist() == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("seeds", "fanouts", "options", "error", "message"),
    [
        (torch.tensor([9]), [1], {}, IndexError, "seeds hold node 9, but the graph has 5 nodes"),
        (torch.tensor([-1]), [1], {}, IndexError, "seeds hold node -1"),
        (torch.tensor([0.5]), [1], {}, TypeError, "int64 tensor of node ids, but are torch.float32"),
        (torch.tensor([0]), [1], {"replace": "no"}, TypeError, "replace must be True or False, but is 'no'"),
        (torch.tensor([0]), [1], {"disjoint": 2}, TypeError, "disjoint must be True or False, but is 2"),
        (torch.tensor([[0]]), [1], {}, ValueError, "one dimension"),
        (torch.tensor([0]), [-2], {}, ValueError, "num_neighbors holds -2"),
        (torch.tensor([0]), [2**40], {}, ValueError, "positive int32"),
        (torch.tensor([0]), [], {}, ValueError, "num_neighbors is empty"),
        (torch.tensor([0]), 5, {}, TypeError, "must be a list of integers"),
        (torch.tensor([0]), {3}, {}, TypeError, "must be a list of integers"),
        (torch.tensor([0]), [True], {}, TypeError, "holds True, but a fanout is an integer"),
        (torch.tensor([0]), torch.tensor([0.5]), {}, TypeError, "holds 0.5, but a fanout is an integer"),
        (torch.tensor([0]), {("a", "to", "a"): [3]}, {}, TypeError, "needs a heterogeneous graph: give one list"),
        (torch.tensor([0]), [1], {"backend": "cuda"}, ValueError, "unknown sampling backend 'cuda'"),
        (torch.tensor([0]), [1], {"key": 2**63}, ValueError, "key .* is 9223372036854775808, but must lie between"),
        (torch.tensor([0]), [1], {"key": 0.5}, TypeError, "key .* must be an integer, but is 0.5"),
        (torch.tensor([0]), [1], {"first_tree": -1}, ValueError, "first_tree is -1"),
        (torch.tensor([2**62]), [1], {}, IndexError, "seeds hold node 4611686018427387904, but the graph has 5 nodes"),
        ([0, 1], [1], {}, TypeError, "int64 tensor of node ids, but are list: give torch.as_tensor"),
        (np.array([0]), [1], {}, TypeError, "but are ndarray: give torch.as_tensor"),
        (torch.tensor([True] * 5), [1], {}, TypeError, "but are torch.bool: give torch.as_tensor.mask..nonzero"),
        (np.array([True] * 5), [1], {}, TypeError, "but are ndarray: give torch.as_tensor.mask..nonzero"),
    ],
)
def test_bad_arguments_are_named(seeds, fanouts, options, error, message):
    graph = CSCGraph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 5)
    with pytest.raises(error, match=message):
        sample_neighbors(graph, seeds, fanouts, **options)


@settings(max_examples=150, deadline=None)
@given(
    graphs(max_nodes=5),
    st.lists(st.integers(-3, 8), max_size=5),
    st.lists(st.integers(-3, 10**12), max_size=4),
    st.integers(-(2**70), 2**70),
    st.sampled_from([None, "numba", "reference"]),
)
def test_fuzzed_arguments_never_crash(graph, seeds, fanouts, key, backend):
    try:
        out = sample_neighbors(graph, torch.tensor(seeds, dtype=torch.int64), fanouts, key, backend=backend)
    except (ValueError, IndexError, RuntimeError, OverflowError):
        return
    assert out.node.numel() >= len(seeds)

"""Samples equal the reference bit for bit, for every kind of sampling and every backend.

Backends: the CPU with a table or a hash table of nodes, and Triton's kernels in the interpreter.
"""

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.graph import CSCGraph, HeteroCSCGraph
from lightning_gnn.ops import Labor
from lightning_gnn.ops.library import runs_triton
from lightning_gnn.ops.sample import triton as operator
from tests.batch_checks import assert_equal
from tests.campaigns import SLICES, campaign
from tests.ops.sample_cases import KINDS, few, hashing, long_lists, random_types, sample, samples, skewed_weights

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not runs_triton(CPU), reason="no interpreter: the cuda tests check the kernels")


def narrow(graph, num_programs, kind=None):
    """Create a graph's kernel samplers with fewer and narrower programs than by default; return the typed one."""
    from lightning_gnn.triton_kernels.sample_relations import TritonRelationSampler

    sizes = list(graph.sizes.values()) if isinstance(graph, HeteroCSCGraph) else [graph.num_nodes]
    options = {"num_programs": num_programs, "num_warps": 1}
    if isinstance(graph, CSCGraph):
        operator._samplers[graph.indices] = {None: operator.triton_sampler(graph.indptr, graph.indices, **options)}
    sampler = (kind or TritonRelationSampler)(sizes, CPU, **options)
    operator._relation_samplers.setdefault(graph, {})[CPU] = sampler
    return sampler


def compare(backend, graph, *args, num_programs=1, **options):
    """Compare a sample with the reference, exactly; return it."""
    expected = sample(graph, *args, backend="reference", **options)
    if backend == "triton":
        narrow(graph, num_programs)
        assert_equal(sample(graph, *args, backend="triton", **options), expected)
    elif backend == "hash":
        with hashing():
            assert_equal(sample(graph, *args, **options), expected)
    else:
        assert_equal(sample(graph, *args, **options), expected)
    return expected


def assert_no_future_edges(graph, found, options):
    """Check that the time of each edge is in the window of its tree."""
    until = torch.cat([*options["seed_time"].values(), torch.empty(0).long()])
    for name, relation in graph.relations.items():
        if relation.time is not None:
            limit = until[found.batch[name[2]][found.edge_index[name][1]]]
            time = relation.time[found.edge[name]]
            assert bool((time <= limit).all())
            if options.get("time_window") is not None:
                assert bool((time > limit - options["time_window"]).all())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["table", "hash"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_the_cpu_equals_the_reference(kind, backend, data):
    graph, *args, options = data.draw(samples(kind))
    found = compare(backend, graph, *args, **options)
    if kind in ("times", "labor") and graph.is_temporal:
        assert_no_future_edges(graph, found, options)


@pytest.mark.slow
@interpreted
@campaign
@pytest.mark.parametrize("kind", KINDS)
def test_triton_equals_the_reference(kind, number):
    @hypothesis.seed(number)
    @settings(max_examples=24 // SLICES, deadline=None)
    @given(samples(kind, few), st.sampled_from([1, 3]))
    def equal(drawn, num_programs):
        graph, *args, options = drawn
        compare("triton", graph, *args, num_programs=num_programs, **options)

    equal()


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(["plain", "one type with times", "with weights", "with labor"]))
def test_a_graph_of_one_type_gives_the_untyped_sample(data, kind):
    graph, seeds, hops, key, options = data.draw(samples(kind))
    untyped = sample(graph, seeds, hops, key, **options)
    if "seed_time" in options:
        options["seed_time"] = {"n": options["seed_time"]}
    typed = HeteroCSCGraph.build({"n": graph.num_nodes}, {("n", "e", "n"): graph})
    for whole, by_type in zip(untyped, sample(typed, {"n": seeds}, hops, key, **options), strict=True):
        assert (whole is None) == (by_type is None)
        if whole is not None:
            (part,) = by_type.values()
            assert_equal(part, whole)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("backend", "fanout", "replace"),
    [
        *(("table", fanout, replace) for fanout in (1, 5, 64, 65, 200) for replace in (False, True)),
        *(pytest.param("triton", *case, marks=[pytest.mark.slow, interpreted])
          for case in ((1, False), (6, False), (15, True))),
    ],
)  # fmt: skip
def test_weights_of_long_lists(backend, fanout, replace):
    count, length = (4, 20) if backend == "triton" else (6, 300)
    graph = skewed_weights(long_lists(count, length, fanout), fanout)
    for key in range(1 if backend == "triton" else 3):
        found = compare(backend, graph, torch.arange(count + 1), [fanout], key, replace=replace)
        if not replace:
            assert all(part.unique().numel() == fanout for part in found.edge.view(count, -1))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("fanout", "often"), [(1, 3), (7, 1), (66, 3), (299, 1)])
def test_labor_on_long_lists(fanout, often):
    # Several tiles of edges, and sources that occur more than once.
    graph = long_lists(3, 300, fanout, torch.int64)
    assert graph.parallel is not None
    compare("triton", graph, torch.arange(4), [fanout], -9, labor=Labor(batch_dependency=often, batch=5))


@pytest.mark.medium
@pytest.mark.parametrize("backend", ["table", pytest.param("triton", marks=interpreted)])
def test_nothing_to_sample(backend):
    compare(backend, HeteroCSCGraph.build({"a": 0, "b": 3}, {}), {"b": torch.tensor([2, 2])}, [2], 1)
    compare(backend, random_types({"a": 12, "b": 9}, 40), {}, [2, 1], 1)


@pytest.mark.medium
@pytest.mark.parametrize("backend", ["table", "hash"])
@pytest.mark.parametrize("disjoint", [False, True])
def test_forests_outgrow_their_hash_table(backend, disjoint):
    graph = random_types({"a": 4000, "b": 3000}, 40_000)
    seeds = {"a": torch.randint(4000, (70,), generator=torch.Generator().manual_seed(0))}
    found = compare(backend, graph, seeds, [5, 5, 5], 1, disjoint=disjoint)
    assert found.node["a"].numel() > 4000 or not disjoint

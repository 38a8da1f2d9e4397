"""Memory plans of a device stay within the budget, and are about as good as the best of all plans."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.features.hot_cache import Cacheable, CacheOrder
from lightning_gnn.gpu_sampling import PersistentLinkDataModule, PersistentSamplerDataModule
from lightning_gnn.gpu_sampling.placement import MODEL_FRACTION, PlacedArray, place_parts
from lightning_gnn.runtime.messages import memory_bytes
from tests.batching_data import small_data
from tests.sampling.cases import GRAPHS, LINK_CASES, make_options

GB = 10**9
EMPTY = Cacheable(np.empty(0), np.empty(0, np.int64), 1.0, 0)


def test_what_fits_alone_but_not_together_is_not_all_on_the_device():
    topology, features = PlacedArray("topology", 39 * GB, reads=3.0), PlacedArray("data.x", 39 * GB, reads=5.0)
    plan = place_parts([topology, features], 80 * GB, buffers=2 * GB)
    assert [part.place for part in plan.parts] == ["pinned", "device"]
    assert (plan.nbytes, plan.hit_rate) == (41 * GB, 5 / 8)
    alone = place_parts([replace(topology, nbytes=GB), features], 80 * GB, buffers=2 * GB)
    assert (alone.nbytes, alone.hit_rate) == (42 * GB, 1.0)


@st.composite
def demands(draw):
    """Draw parts, and other memory on the device."""
    parts, gpus = [], draw(st.sampled_from([1, 1, 2, 4]))
    for name in draw(st.sets(st.sampled_from("abc"))):
        entries = draw(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 1, 4, 7])), max_size=4))
        reads, sizes = (np.array([entry[i] for entry in entries], np.int64) for i in (0, 1))
        hot = Cacheable(reads, sizes, draw(st.sampled_from([1, 3])), draw(st.integers(0, 4)))
        there = draw(st.integers(0, 3))
        parts.append(
            PlacedArray(
                name,
                int(sizes.sum()) + there,
                draw(st.sampled_from(["auto", "auto", "auto", "pinned", "device", "shard"])),
                hot.total,
                there,
                hot if draw(st.integers(0, 3)) else None,
                draw(st.sampled_from([None, (int(sizes.sum()) + there) // gpus + 1])),
                gpus,
            )
        )
    return parts, {"buffers": draw(st.integers(0, 5)), "fixed": draw(st.integers(0, 5))}


def find_best(parts, limit, cache_bytes):
    """Return what the best of all placements with greedy caches saves."""
    best, order = 0.0, CacheOrder([part.hot or EMPTY for part in parts])
    for places in product(*(part.places for part in parts)):
        left = limit - sum(part.bytes_at(place) for part, place in zip(parts, places, strict=True))
        if left >= 0:
            caches = order.best(min(left, cache_bytes), [n for n, place in enumerate(places) if place == "pinned"])
            saved = sum(part.saved_at(place) for part, place in zip(parts, places, strict=True))
            best = max(best, saved + sum(caches.gains))
    return best


@settings(max_examples=100, deadline=None)
@given(demands(), st.integers(0, 120), st.sampled_from([None, 0, 6]))
def test_plans_against_all_plans(demand, memory, cache_bytes):
    parts, rest = demand
    if any(part.places == ["shard"] and part.shard_bytes is None for part in parts):
        with pytest.raises(ValueError, match=r"cannot be sharded across \d GPUs"):
            place_parts(parts, memory, **rest, cache_bytes=cache_bytes)
        return
    least = sum(rest.values()) + sum(part.bytes_at(part.places[0]) for part in parts)
    if least > memory:
        with pytest.raises(ValueError, match=r"the device needs .*, but has"):
            place_parts(parts, memory, **rest, cache_bytes=cache_bytes)
        return
    plan = place_parts(parts, memory, **rest, cache_bytes=cache_bytes)
    limit = max(least, memory - int(MODEL_FRACTION * memory))
    assert plan.nbytes <= limit <= memory
    assert all(placed.place in part.places for part, placed in zip(parts, plan.parts, strict=True))
    if cache_bytes is not None:
        assert sum(part.cache_bytes for part in plan.parts) <= cache_bytes
    best = find_best(parts, limit - sum(rest.values()), memory if cache_bytes is None else cache_bytes)
    total = sum(part.reads for part in parts)
    assert 0.5 * best - 1e-9 <= plan.hit_rate * total <= best + 1e-9  # rarely below 0.95
    if len(parts) < 3 and not any(part.gpus > 1 for part in parts):
        assert plan.hit_rate * total == pytest.approx(best)


def test_tables_are_copied_dealt_out_or_left_in_host_memory():
    topology, features = PlacedArray("topology", 30 * GB, reads=9.0), PlacedArray("data.x", 60 * GB, reads=5.0)
    several = {"gpus": 4}
    parts = [replace(topology, shard_bytes=8 * GB, **several), replace(features, shard_bytes=15 * GB, **several)]
    for memory, places, rate in (
        (130, ["device", "device"], 1.0),
        (80, ["device", "shard"], (9 + 5 * (1 - 0.075)) / 14),
        (32, ["shard", "shard"], 1 - 0.075),
        (24, ["shard", "pinned"], 9 * (1 - 0.075) / 14),
    ):
        plan = place_parts(parts, memory * GB)
        assert [part.place for part in plan.parts] == places
        assert plan.hit_rate == pytest.approx(rate)
    assert "topology 8 GB (a shard on each of 4 GPUs); data.x 0 bytes (the rest in host memory)" in str(plan)
    assert plan.to_dict()["placement"]["topology"] == {"place": "shard", "device_bytes": 8 * GB, "cached": 0}
    with pytest.raises(ValueError, match=r"the device needs 15 GB, but has 10 GB free: data.x 15 GB"):
        place_parts([replace(parts[1], place="shard")], 10 * GB)
    many = [PlacedArray(f"data[{n}].x", 100, "auto", 10.0 - n, shard_bytes=30, gpus=4) for n in range(8)]
    assert [part.place for part in place_parts(many, 420).parts] == ["device"] + ["shard"] * 7
    assert [part.place for part in place_parts(many, 300).parts] == ["shard"] * 7 + ["pinned"]


def plan_placement(data, device_memory, /, **options):
    options = {"num_neighbors": [3, 2], "batch_size": 8, "seed": 3, "cache_bytes": "auto", **options}
    module = PersistentSamplerDataModule(data, **options, device_memory=device_memory)
    return module, module.plan_placement()


def make_skewed_graph():
    """Return a graph whose first nodes are read most."""
    torch.manual_seed(1)
    data = small_data(num_nodes=2000, num_edges=12_000)
    data.edge_index[0] = (torch.rand(12_000) ** 4 * 2000).long()
    data.x = torch.randn(2000, 32)
    return data


def test_a_datamodule_is_planned_for_several_gpus():
    alone, together = (plan_placement(make_skewed_graph(), 600_000, bulk=1, gpus=gpus)[1] for gpus in (1, 8))
    assert "pinned" in [part.place for part in alone.parts]
    assert "pinned" not in [part.place for part in together.parts]
    assert together["data.edge_attr"].nbytes == 12_000 // 8 * 12
    assert together.hit_rate > alone.hit_rate


def test_a_datamodule_is_planned_without_a_gpu_for_any_memory():
    data = make_skewed_graph()
    rates, needed = [], None
    for memory in (450_000, 600_000, 800_000, 4_000_000):
        module, plan = plan_placement(data, memory, bulk=1)
        assert plan.nbytes <= memory - int(MODEL_FRACTION * memory)
        assert plan.memory == memory
        rates.append(plan.hit_rate)
        needed = plan.nbytes
    assert rates[0] < rates[-1] == 1.0
    assert rates == sorted(rates)
    assert [part.place for part in plan.parts] == ["device"] * len(plan.parts)
    assert plan.num_batches == 0
    assert needed > data.x.nbytes + module.graph_sampler.graph.num_bytes


@pytest.mark.parametrize("case", ["links, binary", "typed link times, triplets", "links, labor"])
def test_links_are_planned_too(case):
    data = GRAPHS[LINK_CASES[case][0]]()
    options = make_options(case, data, 6) | {"cache_bytes": "auto"}
    plan = PersistentLinkDataModule(data, **options, device_memory="1GB").plan_placement()
    assert plan.hit_rate == 1.0
    tight = PersistentLinkDataModule(data, **options, device_memory=plan.nbytes).plan_placement()
    assert tight.nbytes <= plan.nbytes
    assert tight.hit_rate < 1.0
    assert any(part.place == "pinned" for part in tight.parts)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(5, 5), ("5", 5), ("80GB", 80 * GB), ("1.5 GB", 1_500_000_000), ("2KiB", 2048), ("3 m", 3_000_000)],
)
def test_numbers_of_bytes(value, expected):
    assert memory_bytes(value, "it") == expected


@pytest.mark.parametrize("value", [-1, True, 1.5, "much", "-4GB", "4PB", None])
def test_what_is_no_number_of_bytes(value):
    with pytest.raises(ValueError, match=r"device_memory must be a number of bytes, such as 4000000000, '4GB'"):
        memory_bytes(value, "device_memory")


def test_bad_budgets_are_named():
    data = small_data()
    options = {"num_neighbors": [2], "batch_size": 8}
    with pytest.raises(ValueError, match=r", but has 1 kB free: .*make prefetch, bulk"):
        PersistentSamplerDataModule(data, **options, device_memory="1kB").plan_placement()
    with pytest.raises(ValueError, match=r"the device needs .*: topology .*, data.x .*, mini-batches"):
        plan_placement(data, 20_000, topology="device", features="device")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"no GPU found to plan for; .* device_memory='80GB'"):
            PersistentSamplerDataModule(data, **options).plan_placement()

"""Memory plans of a device stay within the budget, improve with a larger one, and are as good as any other plan."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.features.hot_cache import Cacheable
from lightning_gnn.gpu_sampling import PersistentLinkDataModule, PersistentSamplerDataModule
from lightning_gnn.gpu_sampling.budget import MODEL_FRACTION, PEER_BYTE_COST, PlacedArray, place_parts
from lightning_gnn.runtime.messages import memory_bytes
from tests.batching_data import small_data
from tests.sampling.cases import GRAPHS, LINK_CASES, make_options

GB = 10**9


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
                draw(st.sampled_from([None, None, torch.arange(len(entries))[:1]])),
                draw(st.sampled_from([None, (int(sizes.sum()) + there) // gpus + 1])),
                gpus,
            )
        )
    return parts, {"buffers": draw(st.integers(0, 5)), "fixed": draw(st.integers(0, 5))}


def list_places(part):
    """Return the possible locations of a part."""
    if part.gpus == 1 and part.place == "shard":
        return ("device",)
    if part.place != "auto":
        return (part.place,)
    return ("device", "pinned", "shard") if part.gpus > 1 and part.shard_bytes is not None else ("device", "pinned")


def count_bytes(part, place):
    return {"device": part.nbytes, "pinned": part.pinned_bytes, "shard": part.shard_bytes}[place]


def find_best(parts, limit, buffers, fixed, cache_bytes):
    """Return what the best of all plans saves, and the largest saving of an entry."""
    entries = [
        (number, int(size), float(reads * part.hot.cost))
        for number, part in enumerate(parts)
        if part.hot is not None and part.cached is None
        for reads, size in zip(part.hot.reads, part.hot.sizes, strict=True)
        if size and reads
    ]
    best = 0.0
    for places in product(*map(list_places, parts)):
        used = buffers + fixed + sum(count_bytes(part, place) for part, place in zip(parts, places, strict=True))
        if used > limit:
            continue
        saved = 0.0
        for part, place in zip(parts, places, strict=True):
            has_cache = part.hot is not None and part.cached is not None and place == "pinned"
            others = part.reads * (part.gpus - 1) / part.gpus
            saved += {"device": part.reads, "shard": part.reads - PEER_BYTE_COST * others}.get(place, 0)
            saved += part.hot.reads[part.cached].sum() * part.hot.cost if has_cache else 0
        own, room = [entry for entry in entries if places[entry[0]] == "pinned"], min(limit - used, cache_bytes)
        for count in range(len(own) + 1):
            for chosen in combinations(own, count):
                lookups = sum(parts[number].hot.lookup_bytes for number in {number for number, *_ in chosen})
                if lookups + sum(size for _, size, _ in chosen) <= room:
                    best = max(best, saved + sum(gain for *_, gain in chosen))
    return best, max((gain for *_, gain in entries), default=0.0), len({size for _, size, _ in entries})


@settings(max_examples=100, deadline=None)
@given(demands(), st.integers(0, 120), st.sampled_from([None, 0, 6]))
def test_plans_against_all_plans(demand, memory, cache_bytes):
    parts, rest = demand
    if any(part.place == "shard" and part.gpus > 1 and part.shard_bytes is None for part in parts):
        with pytest.raises(ValueError, match=r"cannot be sharded across \d GPUs"):
            place_parts(parts, memory, **rest, cache_bytes=cache_bytes)
        return
    asked = [p.pinned_bytes if p.place == "auto" else count_bytes(p, list_places(p)[0]) for p in parts]
    least = sum(rest.values()) + sum(asked)
    if least > memory:
        with pytest.raises(ValueError, match=r"the device needs .*, but has"):
            place_parts(parts, memory, **rest, cache_bytes=cache_bytes)
        return
    plan = place_parts(parts, memory, **rest, cache_bytes=cache_bytes)
    limit = max(least, memory - int(MODEL_FRACTION * memory))
    assert plan.nbytes <= limit
    assert plan.nbytes <= memory
    assert all(placed.place in list_places(part) for part, placed in zip(parts, plan.parts, strict=True))
    if cache_bytes is not None:
        assert sum(part.cache_bytes for part in plan.parts) <= cache_bytes
    best, largest, sizes = find_best(parts, limit, **rest, cache_bytes=memory if cache_bytes is None else cache_bytes)
    saved = sum(placed.saved(part) for placed, part in zip(plan.parts, parts, strict=True))
    assert best - largest - 1e-9 <= saved <= best + 1e-9
    if sizes <= 1:
        assert saved == pytest.approx(best)
    more = place_parts(parts, memory + 5, **rest, cache_bytes=cache_bytes)
    assert more.hit_rate >= plan.hit_rate - 1e-9


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
    alone, together = (plan_placement(make_skewed_graph(), 1_000_000, bulk=1, gpus=gpus)[1] for gpus in (1, 8))
    assert "pinned" in [part.place for part in alone.parts]
    assert "pinned" not in [part.place for part in together.parts]
    assert together["data.x"].nbytes == 2000 // 8 * 32 * 4
    assert together.hit_rate > alone.hit_rate


def test_a_datamodule_is_planned_without_a_gpu_for_any_memory():
    data = make_skewed_graph()
    rates, needed = [], None
    for memory in (1_050_000, 1_200_000, 1_500_000, 4_000_000):
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

"""Whatever happens to cached files: no crash, no wrong data, and they are made anew."""

import os
import random
import time
import warnings

import numpy as np
import pytest
import torch

from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes, keep_plan, kept_plan
from lightning_gnn.datasets import topology_files
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.graph import CSCGraph
from lightning_gnn.graph.csc import check_csc
from lightning_gnn.runtime import manifest
from tests.refusals import refuses

NODES = 60
EDGES = torch.randint(NODES, (2, 400), generator=torch.Generator().manual_seed(0))
TIMES = StageTimes(Duration(0.08, 0.004), Duration(0.002), Duration(0.004), Duration(0.003), Duration(0.005), 8)
PLAN = CollectivePlan("collective", 8, 3, 100, 2.5, TIMES, {"collective": 1.0, "cpu": 3.0}, 4, "a machine", "a model")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(topology_files, "KEPT_FROM", 0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power fails here
    return tmp_path / "cache"


def flip_a_bit(rng, path, others):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(rng, path, others):
    os.truncate(path, rng.randrange(path.stat().st_size))


def swap(rng, path, others):
    other = rng.choice([found for found in others if found != path])
    away = path.with_suffix(".away")
    path.rename(away)
    other.rename(path)
    away.rename(other)


def change_and_restore_the_time(rng, path, others):
    before = path.stat()
    flip_a_bit(rng, path, others)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def remove(rng, path, others):
    path.unlink()


DAMAGES = [flip_a_bit, truncate, swap, change_and_restore_the_time, remove]


def same(a, b):
    return a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)


def sorted_edges(root, monkeypatch):
    root.mkdir()
    np.save(root / "x.npy", np.zeros((NODES, 2), np.float32))
    np.save(root / "edge_index.npy", EDGES.numpy())
    truth = CSCGraph.from_edge_index(EDGES, NODES)

    def right(graph):
        check_csc(graph.indptr, graph.indices, graph.edge_ids, NODES)  # or the sampler would read outside of it
        return all(same(getattr(graph, name), getattr(truth, name)) for name in ("indptr", "indices", "edge_ids"))

    return lambda: load_folder(root).graph, right


def plan(root, monkeypatch):
    def load():
        if kept_plan(PLAN.machine, PLAN.configuration) is None:
            keep_plan(PLAN)
        return kept_plan(PLAN.machine, PLAN.configuration)

    return load, lambda found: found == PLAN


@pytest.mark.parametrize("remembered", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("make", [sorted_edges, plan])
def test_what_is_damaged_is_made_anew(make, damage, remembered, tmp_path, cache, monkeypatch):
    load, right = make(tmp_path / "data", monkeypatch)
    if remembered:  # what was verified is not read again, although it was written just now
        monkeypatch.setattr(manifest, "_SETTLED_NS", -(10**9))
    assert right(load())
    rng = random.Random(f"{make.__name__} {damage.__name__}")
    for _ in range(16):
        files = [path for path in sorted(cache.rglob("*")) if path.is_file() and path.parent.name != "locks"]
        before = [path.read_bytes() for path in files]
        time.sleep(0.01 * remembered)  # the clock of files must tick between
        damage(rng, rng.choice(files), files)
        if before == [path.read_bytes() if path.exists() else None for path in files]:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert right(load())
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*damaged")  # it is whole again
            assert right(load())


def test_plans_of_users_that_were_cut(tmp_path):
    path = tmp_path / "plan.yaml"
    PLAN.save(path)
    whole = path.read_text()
    for cut in [whole[:at] for at in range(0, len(whole) - 4, 7)]:
        path.write_text(cut)
        refuses(ValueError, r"plan\.yaml holds no plan of collective batching: ", CollectivePlan.load, path)

"""Campaigns against everything cached: whatever happens to the files, no crash, no wrong data, and it is made anew."""

import os
import random
import time
import warnings
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes, keep_plan, kept_plan
from lightning_gnn.graph import CSCGraph, topology_files
from lightning_gnn.graph.csc import check_csc
from lightning_gnn.graph.folder import load_folder
from lightning_gnn.runtime import manifest
from tests.campaigns import SLICES, campaign

NODES, EDGES = 60, 400
TICK = {"seconds": 0.0}


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


def content(path):
    return path.read_bytes() if path.is_file() else None


def damage_and_load(count, seed, files, load, judge, damages=DAMAGES):
    """Damage cached files, load, and load again; return how often what came of it was no good.

    Args:
        count: How many damages are done that change anything, of all slices together.
        seed: Seed of the choices.
        files: Returns the files of an entry that is whole.
        load: Loads what is cached.
        judge: Returns what is wrong with what was loaded, or None.
    """
    rng, found, done = random.Random(seed), Counter(), 0
    while done * SLICES < count:
        present = files()
        path, damage = rng.choice(present), damages[done % len(damages)]
        before = [content(other) for other in present]
        time.sleep(TICK["seconds"])
        damage(rng, path, present)
        if before == [content(other) for other in present]:
            continue
        done += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                outcome = judge(load())
            except Exception as error:
                outcome = f"ended the run: {type(error).__name__}"
        if outcome:
            found[outcome] += 1
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                again = judge(load())
            except Exception as error:
                again = type(error).__name__
        if again or any("damaged" in str(warning.message) for warning in said):
            found["never healed"] += 1
    return dict(found)


def edges(seed=0):
    return torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(seed))


def same(a, b):
    return a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)


def judge_topology(graph, truth):
    """Return whether the sampler would read outside of the graph, or find other neighbours."""
    try:
        check_csc(graph.indptr, graph.indices, graph.edge_ids, NODES)
    except (TypeError, ValueError):
        return "crash"
    return (
        None if all(same(getattr(graph, n), getattr(truth, n)) for n in ("indptr", "indices", "edge_ids")) else "wrong"
    )


def data_folder(root):
    root.mkdir()
    np.save(root / "x.npy", np.zeros((NODES, 2), np.float32))
    np.save(root / "edge_index.npy", edges().numpy())
    return root


def as_after_two_seconds(monkeypatch):
    """What was verified is not read again, although it was written just now; the clock of files must tick between."""
    monkeypatch.setattr(manifest, "_SETTLED_NS", -(10**9))
    monkeypatch.setitem(TICK, "seconds", 0.01)


def entry_files(cache, kind):
    return lambda: [path for path in sorted((cache / kind).rglob("*")) if path.is_file()]


@campaign
@pytest.mark.parametrize("remembered", [False, True])
def test_sorted_edges(tmp_path, cache, monkeypatch, remembered, number):
    root = data_folder(tmp_path / "g")
    if remembered:
        as_after_two_seconds(monkeypatch)
    truth = CSCGraph.from_edge_index(edges(), NODES)
    load_folder(root)
    files = entry_files(cache, "topology")
    judge = partial(judge_topology, truth=truth)
    assert damage_and_load(120, f"edges {remembered} {number}", files, lambda: load_folder(root).graph, judge) == {}


def test_edges_replaced_by_files_with_the_old_time(tmp_path, cache, monkeypatch):
    as_after_two_seconds(monkeypatch)
    root = data_folder(tmp_path / "g")
    path = root / "edge_index.npy"
    found = Counter()
    for seed in range(60):
        load_folder(root)
        before = path.stat()
        time.sleep(TICK["seconds"])
        if seed % 2:
            path.unlink()
        np.save(path, edges(seed + 1).numpy())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        found[judge_topology(load_folder(root).graph, CSCGraph.from_edge_index(edges(seed + 1), NODES))] += 1
    assert found == {None: 60}


TIMES = StageTimes(Duration(0.08, 0.004), Duration(0.002), Duration(0.004), Duration(0.003), Duration(0.005), 8)
PLAN = CollectivePlan("collective", 8, 3, 100, 2.5, TIMES, {"collective": 1.0, "cpu": 3.0}, 4, "a machine", "a model")


@campaign
def test_kept_plans(cache, number):
    def load():
        if (plan := kept_plan(PLAN.machine, PLAN.configuration)) is None:
            keep_plan(PLAN)
            plan = kept_plan(PLAN.machine, PLAN.configuration)
        return plan

    load()
    judge = lambda plan: None if plan == PLAN else "wrong"  # noqa: E731
    assert damage_and_load(120, f"plans {number}", entry_files(cache, "plans"), load, judge) == {}


def test_plans_of_users_that_were_cut(tmp_path):
    path = tmp_path / "plan.yaml"
    PLAN.save(path)
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    cuts = ["".join(lines[:count]) for count in range(len(lines))] + [whole[:at] for at in range(0, len(whole) - 4, 7)]
    for cut in cuts:
        path.write_text(cut)
        with pytest.raises(ValueError, match=r"plan\.yaml holds no plan of collective batching: "):
            CollectivePlan.load(path)

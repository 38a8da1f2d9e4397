"""NUMA nodes are read where Linux lists them, and CPU trainers kept on one each."""

import os

import pytest

from lightning_gnn.hyscale import numa

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone has it")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Make a machine of these lists of cores, of which this process may use some."""

    def make(lists, allowed):
        for name, cores in lists.items():
            (tmp_path / name).mkdir()
            if cores is not None:
                (tmp_path / name / "cpulist").write_text(cores)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed), raising=False)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("lists", "allowed", "expected"),
    [
        (
            {"node0": "0-3,8-11\n", "node1": "4-7,12-15\n"},
            range(16),
            [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}],
        ),
        ({"node0": "0-3", "node1": "4-7"}, [1, 2, 6], [{1, 2}, {6}]),
        ({"node0": "0-3", "node1": "4-7"}, [5], [{5}]),
        ({"node10": "2", "node2": "1", "node1": "0"}, range(3), [{0}, {1}, {2}]),
        ({"node0": "0-1", "node1": "\n"}, range(2), [{0, 1}]),  # memory without cores
        ({"node0": None, "node1": "0,1"}, range(4), [{0, 1}]),
        ({"node0": "what", "node1": "0"}, range(4), [{0}]),
        ({"power": "0", "nodes": "1"}, range(4), [{0, 1, 2, 3}]),
        ({}, range(2), [{0, 1}]),
    ],
    ids=["two", "some cores", "one node's cores", "by number", "memory alone", "no list", "odd list", "others", "none"],
)
def test_cores_of_each_node(lists, allowed, expected, machine):
    assert numa.numa_cores(machine(lists, allowed)) == expected


@needs_affinity
@pytest.mark.parametrize(
    ("nodes", "num_cpu", "expected"),
    [
        ([{0, 1}, {2, 3}], 2, [{0, 1}, {2, 3}, None]),
        ([{0, 1}, {2, 3}], 4, [{0, 1}, {0, 1}, {2, 3}, {2, 3}, None]),
        ([{0}, {1}, {2}, {3}], 2, [{0}, {2}, None]),
        ([{0, 1}], 2, [None, None, None]),
    ],
)
def test_cpu_trainers_are_spread_over_the_nodes(nodes, num_cpu, expected, monkeypatch):
    monkeypatch.setattr(numa, "numa_cores", lambda: nodes)
    pinned = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: pinned.append((pid, set(cores))))
    for trainer, cores in enumerate(expected):
        pinned.clear()
        numa.pin_to_numa_node(trainer, num_cpu)
        assert pinned == ([] if cores is None else [(0, cores)])

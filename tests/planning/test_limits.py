import pytest
import torch

from lightning_gnn.planning import limits
from lightning_gnn.planning.limits import MachineLimits, machine_limits
from lightning_gnn.runtime import machine_rates


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine_rates, "is_busy", lambda: False)
    return tmp_path / "cache"


@pytest.mark.slow
def test_measured_once_for_each_number_of_threads(monkeypatch, cache):
    monkeypatch.setattr(limits, "_ARRAY_BYTES", 1 << 22)
    before = torch.get_num_threads()
    found = machine_limits(1)
    assert torch.get_num_threads() == before
    assert found.threads == 1
    assert all(value > 0 for value in vars(found).values())
    monkeypatch.setattr(limits, "measure_limits", lambda threads: pytest.fail("it was measured before"))
    assert machine_limits(1) == found
    with pytest.raises(pytest.fail.Exception):
        machine_limits(2)


def test_what_a_busy_machine_reaches_is_not_kept(monkeypatch, cache):
    made = iter(MachineLimits(1, rate, 1.0, 1.0, 1.0, 1.0) for rate in (1.0, 2.0))
    monkeypatch.setattr(limits, "measure_limits", lambda threads: next(made))
    monkeypatch.setattr(machine_rates, "is_busy", lambda: True)
    assert machine_limits(1).copy_bandwidth == 1.0
    monkeypatch.setattr(machine_rates, "is_busy", lambda: False)
    assert machine_limits(1).copy_bandwidth == 2.0
    monkeypatch.setattr(machine_rates, "is_busy", lambda: True)
    assert machine_limits(1).copy_bandwidth == 2.0


def test_without_a_place_it_is_measured_each_time(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path / "file"))
    calls = []
    monkeypatch.setattr(limits, "measure_limits", lambda threads: calls.append(threads) or made)
    made = MachineLimits(3, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert [machine_limits(3), machine_limits(3)] == [made, made]
    assert calls == [3, 3]

"""``lgnn plan plan.network=…``: the table for several machines, each with a partition of the graph."""

import pytest
import yaml

from lightning_gnn.cli.commands import plan_cpu
from lightning_gnn.cli.commands.plan_machines import parse_network
from tests.cli.command import NODE, lgnn


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(plan_cpu, "suggest_overrides", lambda cfg: [])


def plan(directory, *overrides):
    return lgnn(directory, *overrides, base=NODE, command=["plan"])


@pytest.mark.slow
def test_machines_are_planned_on_the_graph_at_hand(tmp_path, capfd):
    assert plan(tmp_path, "plan.network=10Gbit/s", "plan.nodes=[1,2,4,100000]", "plan.order=local") == 0
    printed = capfd.readouterr().out
    found = yaml.safe_load((tmp_path / "machines.yaml").read_text())
    one, two, four, many = found["machines"]
    assert found["network"] == {"bandwidth": 1.25e9, "latency": 50e-6}
    assert [one["partition"], two["partition"]] == ["one machine", "ldg"]
    assert one["remote_bytes"] == 0 < two["remote_bytes"]
    assert one["speedup"] == 1
    assert one["steps"] > two["steps"] > four["steps"] >= 1
    assert one["memory"]["rows"] > two["memory"]["rows"] > four["memory"]["rows"]
    assert four["epoch_s"] >= four["steps"] * max(four["bounds_s"].values())
    assert "parts=100000" in many["missing"]
    assert "parts=100000" in printed
    assert "remote MB/step" in printed


@pytest.mark.slow
def test_a_folder_of_parts_is_what_is_counted_on(tmp_path, capfd):
    from lightning_gnn.cli.commands.partition import main

    data = [item for item in NODE if item.startswith("data.")]
    assert main([*data, "parts=4", "method=random", f"out={tmp_path}/parts"]) == 0
    given = ["plan.network=1e9", f"plan.partition={tmp_path}/parts", "plan.nodes=[2,4,8]", "plan.method=random"]
    assert plan(tmp_path / "plan", *given) == 0
    found = yaml.safe_load((tmp_path / "plan" / "machines.yaml").read_text())["machines"]
    assert [row["partition"] for row in found] == ["4 parts (random)"] * 2 + ["random"]
    capfd.readouterr()
    assert plan(tmp_path / "cached", *given, "plan.cache=20kB") == 0
    assert "order=global, cache=20 kB" in capfd.readouterr().out
    cached = yaml.safe_load((tmp_path / "cached" / "machines.yaml").read_text())["machines"]
    for row, other in zip(cached, found, strict=True):
        assert row["memory"]["cache"] == 20_000 > other["memory"]["cache"] == 0
        assert row["remote_rows"] < other["remote_rows"]
        assert row["remote_bytes"] < other["remote_bytes"]
    assert plan(tmp_path / "other", *given, "data.num_nodes=150") == 2
    assert "is of another graph" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "rate"), [("10Gbit/s", 1.25e9), ("1.25GB/s", 1.25e9), ("100 Mbit/s", 12.5e6), (3e6, 3e6), ("2e8", 2e8)]
)
def test_bandwidths_as_people_write_them(text, rate):
    assert parse_network(text, 0).bandwidth == rate


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [
    ["plan.network=fast"], ["plan.network=0"], ["plan.network=1Gbit/s", "plan.latency=-1"],
    ["plan.network=1Gbit/s", "plan.order=random"], ["plan.network=1Gbit/s", "plan.nodes=[0]"],
    ["plan.network=1Gbit/s", "plan.cache=much"],
    ["plan.network=1Gbit/s", "strategy=hyscale"], ["plan.nodes=[1,2]"],
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_measured(tmp_path, overrides, capfd, monkeypatch):
    monkeypatch.setattr(plan_cpu, "measure_run", lambda *args, **options: pytest.fail("measured"))
    assert plan(tmp_path, *overrides) == 2
    assert "plan." in capfd.readouterr().err

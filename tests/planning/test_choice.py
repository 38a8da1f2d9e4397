"""The choice of a DataModule and a strategy by predicted iterations, and descriptions of machines."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_gnn.hyscale.analytic import PerformanceModel, Workload
from lightning_gnn.hyscale.plan import plan
from lightning_gnn.planning.choice import AutoDataModule, Option, choose
from lightning_gnn.planning.machine import read_machine

MACHINES = sorted((Path(__file__).parents[2] / "examples/machines").glob("*.yaml"))
FIELDS = {"cpu": "{flops: 1e12, memory_bandwidth: 1e11}", "cores": "8"}


def make_plan(seconds, staged, buffers=(1, 1, 1, 0), **alone):
    names = {"neighbor": "CPU prepares all", "persistent": "accelerators prepare all"}
    names["collective"] = "collective batching"
    single = {"hybrid training": (None, staged), **{names[name]: (None, value) for name, value in alone.items()}}
    return SimpleNamespace(seconds=seconds, alone=single, mapping=SimpleNamespace(buffers=buffers))


ALONE = {"neighbor": 10.0, "persistent": 8.0, "collective": 6.0}


@pytest.mark.parametrize(
    ("strategy", "plans", "expected"),
    [
        ("auto", {0: make_plan(6, 9, **ALONE), 1: make_plan(5.8, 7)}, ("auto", "collective", 0)),
        ("auto", {0: make_plan(6, 9, **ALONE), 1: make_plan(5.6, 7)}, ("hyscale", "collective", 1)),
        ("auto", {0: make_plan(6, 9, **ALONE), 1: make_plan(5, 5, None)}, ("hyscale", "neighbor", 1)),
        ("ddp", {0: make_plan(1, 1, **ALONE)}, ("ddp", "collective", 0)),
        ("auto", {0: make_plan(6, 6, **ALONE | {"persistent": 6.05})}, ("auto", "persistent", 0)),
        ("hyscale", {1: make_plan(5, 7)}, ("hyscale", "collective", 1)),
        ("hyscale", {1: make_plan(7, 7, None)}, ("hyscale", "neighbor", 1)),
        ("ddp", {0: make_plan(7, 7, None)}, ("ddp", "neighbor", 0)),
    ],
)
def test_the_fastest_is_chosen_and_hyscale_must_gain(strategy, plans, expected):
    option, seconds = choose(plans, strategy)
    assert option == Option(*expected)
    assert option in seconds


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_the_examples_of_machines_are_planned(path):
    machine = read_machine(path)
    work = Workload(2_449_029, 123_718_280, 196_615, 1024, (15, 10, 5), (100, 256, 256, 47))
    found = plan(PerformanceModel(machine, work).costs(0), 1024, 0, machine.cores, 10)
    assert sum(found.mapping.seeds) == 1024
    assert set(choose({0: found}, "ddp")[1]) == {
        Option("ddp", name) for name in ("neighbor", "persistent", "collective")
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"core": "8"}, "core is unknown; use cpu, cores"),
        ({"cpu": "{flops: 1e12, memory_bandwidth: 1e11, speed: 1}"}, "cpu.speed is unknown"),
        ({"cores": None}, "cores is missing"),
        ({"cpu": "{flops: 1e12}"}, "cpu.memory_bandwidth is missing"),
        ({"cores": "8.5"}, "cores must be a whole number, but is 8.5"),
        ({"cores": "true"}, "cores must be a whole number"),
        ({"sampling": "fast"}, "sampling must be a number, but is 'fast'"),
        ({"sampling": ".nan"}, "sampling must be a number, but is nan"),
        ({"cpu": "7"}, "cpu must hold lines"),
        ({"cpu": "{flops: -1, memory_bandwidth: 1e11}"}, "cpu: flops and memory_bandwidth must be positive"),
        ({"num_accelerators": "2"}, "num_accelerators=2 with accelerator=None: give both or neither"),
        ({"cores": "[8"}, ""),
    ],
    ids=str,
)
def test_a_wrong_description_names_the_file_and_the_field(changes, message, tmp_path):
    path = tmp_path / "machine.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in (FIELDS | changes).items() if value is not None))
    with pytest.raises(ValueError, match=re.escape(f"plan.machine={path}: {message}")):
        read_machine(path)


def test_a_file_that_is_missing_and_a_class_that_cannot_be_built():
    with pytest.raises(ValueError, match=r"plan\.machine=nowhere\.yaml: .*No such file"):
        read_machine("nowhere.yaml")
    with pytest.raises(ValueError, match="give neighbor, persistent or collective"):
        AutoDataModule(num_neighbors=[3])

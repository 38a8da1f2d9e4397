"""The table of chips: complete for the twin's cost model, documented, and consistent with what is published."""

import re

import pytest

from benchmarks.ascend_sim_machines import CHIP_FACTS, MACHINES, machine
from lightning_gnn.ascend_ops.build import TWIN

COST = TWIN / "include" / "twin" / "cost.h"


def twin_parameters():
    return re.findall(r"^\s*X\((\w+), ", COST.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", MACHINES)
def test_every_parameter_of_the_twin_is_a_fact_with_a_source(name):
    chip = machine(name)
    assert twin_parameters()
    assert set(chip.facts) == {*twin_parameters(), *CHIP_FACTS}
    assert set(chip.parameters()) == set(twin_parameters())
    for fact in chip.facts.values():
        assert fact.source
        assert fact.unit
        assert fact.confidence in ("high", "medium", "low", "-")
        assert (fact.confidence == "low") == fact.source.startswith("guess")
    for fact in chip.facts:
        assert fact in chip.table()


def test_peak_rates_are_those_that_are_published():
    def tflops(chip):
        return 2 * 4096 * chip["cube_macs"] * chip["clock_mhz"] * chip.cube_cores / 1e6

    assert tflops(machine("unified")) == pytest.approx(221, rel=0.01)
    assert tflops(machine("split")) == pytest.approx(364, rel=0.01)
    # 2048 bits a cycle, the paper's section 2.1
    assert all(chip["vector_bytes"] * 8 == 2048 for chip in MACHINES.values())
    assert machine("unified").unified
    assert not machine("split").unified


@pytest.mark.parametrize("name", MACHINES)
def test_readers_share_hbm_and_none_gets_more_than_its_port(name):
    chip = machine(name)
    total = chip["hbm_gb_s"] * 1e9
    for readers in (1, chip.cube_cores, chip.vector_cores, 3 * chip.vector_cores):
        each = chip.parameters(readers)["hbm_bytes"]
        assert each <= chip["hbm_bytes"]
        assert each * chip["clock_mhz"] * 1e6 * readers <= total * 1.001
    assert chip.parameters(3 * chip.vector_cores)["hbm_bytes"] < chip["hbm_bytes"]
    assert chip.parameters()["hbm_bytes"] == chip["hbm_bytes"]


def test_facts_can_be_changed():
    chip = machine("split")
    assert chip.parameters(mte_head=7)["mte_head"] == 7
    assert chip["mte_head"] != 7


def test_bad_input():
    with pytest.raises(ValueError, match=r"arch 'a100' is unknown; use one of unified, split"):
        machine("a100")
    with pytest.raises(ValueError, match="no fact 'mte_heads'"):
        machine("split").parameters(mte_heads=3)
    with pytest.raises(ValueError, match="readers must be at least 1"):
        machine("split").parameters(readers=0)

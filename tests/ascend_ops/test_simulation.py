"""The simulated chip: it agrees with the CPU twin, loses no byte, and keeps the order of what can and cannot be."""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from benchmarks.ascend_sim_machines import machine
from lightning_gnn.ascend_ops.tiling import cube_tables, fields, row_tables, up
from lightning_gnn.graph.hybrid_plan import PlanSettings, plan_cores
from lightning_gnn.ops.aggregate.chip_plan import plan_chip
from tests.ascend_ops.chunk_arrays import random_chunks

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "ascend_ops" / "csrc"
UNITS = ("scalar", "vector", "cube", "mte1", "mte2", "mte3", "fix")


@pytest.fixture(scope="module")
def load():
    # The benchmarks are no part of the installed package: they are found from the top of the repository.
    sys.path.insert(0, str(ROOT))
    yield lambda name: importlib.import_module(f"benchmarks.{name}")
    sys.path.remove(str(ROOT))


@pytest.fixture(scope="module")
def check(load):
    return load("ascend_sim_check")


@pytest.fixture(scope="module")
def model(load):
    return load("ascend_sim_model")


def agrees(ours, real, makespan):
    """The same instructions, byte for byte and cycle for cycle; a makespan also depends on who came first to L2."""
    assert ours.fractals == real.fractals
    assert ours.elements == real.elements
    for path, count in ours.bytes.items():
        if path in real.bytes:
            assert count == real.bytes[path], path
    for unit in UNITS:
        assert ours.busy[unit] == pytest.approx(real.busy(unit), rel=0.01), unit
    assert ours.cycles == pytest.approx(real.makespan, rel=makespan)


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "groups", "workers"), [(256, 1, 4), (100, 2, 6), (602, 3, 3)])
@pytest.mark.parametrize("flat", [True, False])
def test_model_agrees_with_the_twin(check, columns, groups, workers, flat):
    chunks = check.small_graph(300, 3000).forward
    plan = plan_cores(columns, chunks.loads.numpy(), PlanSettings(num_groups=groups), workers)
    for name in ("split", "unified"):
        agrees(*check.compare_vector(machine(name), chunks, plan, flat), 0.002 if flat else 0.03)
    agrees(*check.compare_cube(machine("split"), chunks, plan, flat), 0.002 if flat else 0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        (300, 602, 256, {"transpose_b": True, "bias": True}),
        (602, 300, 256, {"transpose_a": True, "split_k": 3}),
        (300, 41, 250, {}),
    ],
)
def test_model_of_update_agrees_with_the_twin(check, shape):
    *sizes, how = shape
    agrees(*check.compare_update(machine("split"), *sizes, flat=True, **how), 0.002)


def test_model_of_combine_parts_agrees_with_the_twin(check):
    first = np.concatenate([[0], np.cumsum(np.random.default_rng(0).integers(1, 6, 40))])
    agrees(*check.compare_combine(machine("split"), first, 256, flat=True), 0.01)


def test_model_without_double_buffering_agrees_with_the_twin(check, tmp_path):
    twin = importlib.import_module("lightning_gnn.ascend_ops.twin")
    for source in [*CSRC.glob("*.h"), CSRC / "aggregate_cube.cpp"]:
        text = source.read_text()
        (tmp_path / source.name).write_text(text.replace("BUFFER_NUM = 2", "BUFFER_NUM = 1"))
    assert "BUFFER_NUM = 1" in (tmp_path / "load_tiling.h").read_text()
    single = twin.Twin([tmp_path / "aggregate_cube.cpp"])
    chunks = check.small_graph(300, 3000).forward
    plan = plan_cores(256, chunks.loads.numpy(), PlanSettings(num_groups=1), 4)
    agrees(*check.compare_cube(machine("split"), chunks, plan, True, single, buffers=1), 0.002)


def cube_case(seed, columns, groups, members, **sizes):
    chunks = random_chunks(seed, 150, 1500, 4 * members, most_entries=40)
    return chunks, cube_tables(chunks.tables, chunks.even_ranges(members), groups, columns, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unified", "split"])
@pytest.mark.parametrize(("columns", "groups", "members"), [(256, 1, 3), (41, 2, 2), (602, 4, 2)])
def test_bytes_are_those_of_the_tables(model, name, columns, groups, members):
    chip = machine(name)
    _, tables = cube_case(1, columns, groups, members, tile_columns=64)
    launch = model.aggregate_cube(model.Setting(chip), tables, 150, 150)
    blocks, tiles = tables.row_blocks, tables.tiles
    wide = up(columns)
    at = fields("AggregateTiling", tables.tiling)["panelOffset"]
    panels = tables.plan[at:].reshape(-1, 4)
    rows = np.repeat(-(-blocks[:, 2] // 16) * 16, blocks[:, 1] - blocks[:, 0]).astype(np.int64)
    used, k = tiles[:, 1].astype(np.int64), -(-tiles[:, 1].astype(np.int64) // 16) * 16
    entries = (tiles[:, 3] + tiles[:, 5]).astype(np.int64)
    assert panels[:, 1].sum() == wide
    times = len(panels)
    # lists once per panel, each column's row once per tile, in pieces that make up the row
    assert launch.bytes["gm_to_ub"] == times * (4 * k + 4 * entries).sum() + 2 * wide * used.sum()
    # 4 bytes for rows of split vertices, which go to the float parts
    parts = tables.num_parts
    assert (
        launch.bytes["l0c_to_gm" if name == "split" else "gm_write"]
        == 2 * wide * (blocks[:, 2].sum() - parts) + 4 * wide * parts
    )
    assert launch.fractals == (rows // 16 * (k // 16)).sum() * (wide // 16)
    assert launch.bytes["l1_to_l0b"] == 2 * wide * k.sum()
    dense = 2 * times * (rows * k).sum() + 2 * wide * k.sum()
    if name == "split":
        assert launch.bytes["gm_to_l1"] == dense == launch.bytes["ub_to_gm"]
    else:
        assert launch.bytes["ub_to_l1"] == dense
        assert launch.bytes["gm_to_l1"] == launch.bytes["l0c_to_gm"] == 0
    # all that is read comes through L2, and whatever fits is brought there once
    assert launch.bytes["l2_read"] == launch.bytes["gm_to_ub"] + launch.bytes["gm_to_l1"]
    assert launch.bytes["hbm_read"] > 0


@pytest.mark.parametrize("name", ["unified", "split"])
@pytest.mark.parametrize("seed", range(4))
def test_no_unit_works_longer_than_the_launch_and_buffers_only_help(model, name, seed):
    chip = machine(name)
    columns, groups, members = [(256, 1, 3), (41, 2, 2), (602, 4, 2), (16, 1, 5)][seed]
    chunks, tables = cube_case(seed, columns, groups, members, tile_columns=64)
    lists = row_tables(chunks.tables, chunk_ranges=chunks.even_ranges(members), num_groups=groups, num_columns=columns)
    flat = (("hbm_bytes", 1e9),)  # who comes first to L2 must not matter here
    for run in (
        lambda setting: model.aggregate_cube(setting, tables, 150, 150),
        lambda setting: model.aggregate_vector(setting, lists, 150, 150, True),
        lambda setting: model.update(setting, 300, 41, 256, bias=True),
    ):
        double = run(model.Setting(chip, share_hbm=False, changes=flat))
        single = run(model.Setting(chip, 1, share_hbm=False, changes=flat))
        serial = run(model.Setting(chip, 1, serial=True, share_hbm=False, changes=flat))
        for launch in (double, single, serial):
            assert 0 < max(launch.busiest.values()) <= launch.cycles
            assert launch.ends.max() == launch.cycles
            assert sum(launch.busy.values()) > 0
        assert double.cycles <= single.cycles <= serial.cycles
        assert double.bytes == single.bytes == serial.bytes
        assert double.fractals == single.fractals


@pytest.mark.parametrize("buffers", [1, 2])
def test_rows_on_their_way_hide_each_others_latency(model, buffers):
    chip = machine("split")
    chunks = random_chunks(5, 400, 12_000, 12)
    lists = row_tables(chunks.tables, chunk_ranges=chunks.even_ranges(12), num_columns=256)
    flat = (("hbm_bytes", 1e9),)

    def run(changes=flat, **how):
        setting = model.Setting(chip, buffers, share_hbm=False, changes=changes, **how)
        return model.aggregate_vector(setting, lists, 400, 400, True)

    kernel, one = run(), run(rows_at_once=1)
    assert run(rows_at_once=16).cycles == kernel.cycles
    assert one.bytes == kernel.bytes
    assert one.cycles > kernel.cycles * 2
    alone = run(rows_at_once=1, own_lists=True)
    assert alone.bytes == kernel.bytes
    assert alone.cycles > one.cycles
    # without a latency there is little to hide
    at_once = (*flat, ("l2_read_latency", 0), ("l2_write_latency", 0))
    assert run(at_once, rows_at_once=1).cycles < run(at_once).cycles * 2


def test_cores_share_hbm(model):
    chip = machine("split")
    chunks = random_chunks(3, 4000, 12_000, 48)
    lists = row_tables(chunks.tables, chunk_ranges=chunks.even_ranges(48), num_columns=1024)
    scarce = (("hbm_gb_s", 100.0),)
    shared = model.aggregate_vector(model.Setting(chip, changes=scarce), lists, 4000, 4000, True)
    alone = model.aggregate_vector(model.Setting(chip, share_hbm=False), lists, 4000, 4000, True)
    rate = 100e3 / chip["clock_mhz"]
    assert shared.bytes["hbm_read"] / rate <= shared.cycles * 1.001
    assert alone.bytes["hbm_read"] / rate > alone.cycles  # else it would show nothing
    assert alone.cycles < shared.cycles


def test_a_row_comes_from_hbm_once_for_as_long_as_it_fits_l2(model):
    chip = machine("unified")
    chunks = random_chunks(4, 500, 5000, 6)
    lists = row_tables(chunks.tables, chunk_ranges=chunks.even_ranges(6), num_columns=256)
    used = np.unique(lists.columns).size

    def read(l2_bytes):
        setting = model.Setting(chip, changes=(("l2_bytes", l2_bytes),))
        return model.aggregate_vector(setting, lists, 500, 500, True).bytes["hbm_read"]

    lists_bytes = 8 * lists.columns.size
    assert used * 512 + lists_bytes <= read(2**25) <= used * 512 + lists_bytes + 4096
    assert read(2**12) > 4 * read(2**25)


def test_tables_for_another_plan_are_those_made_for_it(load):
    epoch = load("ascend_sim_epoch")
    model = load("ascend_sim_model")
    graph = epoch.make_graph("Cora", None, 10)
    orders = {"natural": graph.natural.forward, "locality": graph.compressed.forward}
    for groups in (3, 2):
        chip = model.Setting(machine("split")).parameters
        plan = plan_chip(100, orders, PlanSettings(num_groups=groups), 12, chip, kernels=("cube",))
        arrays = model.tables_of(orders[plan.order].recut(plan.height))
        made = graph.cube_tables(plan, 64)
        wanted = cube_tables(arrays, plan.chunk_ranges, groups, 100, tile_columns=64)
        for field in ("tiling", "plan", "row_blocks", "tiles", "columns", "positions", "runs", "splits"):
            np.testing.assert_array_equal(getattr(made, field), getattr(wanted, field), err_msg=field)
        assert (made.num_blocks, made.workspace_bytes) == (wanted.num_blocks, wanted.workspace_bytes)


def test_steps_of_an_epoch(load):
    epoch = load("ascend_sim_epoch")
    graph = epoch.make_graph("PubMed", None, 10)
    chip = machine("split")
    runs = {step: epoch.simulate(epoch.Setting(chip), graph, step) for step in epoch.STEPS}
    for step, run in runs.items():
        assert run.cycles == sum(launch.cycles for _, launch in run.launches)
        assert [what for what, _ in run.launches].count("aggregate") == 4  # two layers, forward and backward
        assert 0 < run.share("aggregate") < 1
        assert 0 < run.busy("cube", chip.cube_cores) < 1
        assert 0 < run.running("cube") <= run.running() <= 1
        assert run.busy("cube", chip.cube_cores) < run.running("cube")  # a task is more than its products
        assert run.idle().shape == (chip.vector_cores,)
        assert 0 <= run.idle().min() <= run.idle().max() < 1
        assert run.milliseconds < run.milliseconds_launched
        assert bool(run.plans) == (step != "baseline")
        kernels = {launch.kernel for _, launch in run.launches}
        chosen = {f"aggregate_{plan.kernel}" for plan in run.plans.values()} or {"aggregate_vector"}
        assert {kernel for kernel in kernels if "aggregate" in kernel} == chosen
        assert step in ("+CT", "+IP") or chosen == {"aggregate_vector"}
        compared = load("ascend_planned").compare(run, graph)
        assert set(compared["by columns"]) == set(map(str, graph.widths[:2]))
        for percent in (compared["all"], *compared["by columns"].values()):
            assert 80 < percent < 120, step
    assert runs["+IP"].cycles <= runs["+CT"].cycles
    for width, load_of in runs["baseline"].loads.items():
        assert load_of.sum() == graph.topology.num_edges * width == runs["+HP"].loads[width].sum()
    # figure 4's point: the plan shares out better than ranges of vertices
    assert runs["+HP"].plans[graph.widths[1]].balance < max(
        loads.max() / loads.mean() for loads in runs["baseline"].loads.values()
    )


@pytest.mark.slow
def test_benchmark_writes_its_files(load, tmp_path, monkeypatch, capsys):
    benchmark = load("ascend_sim")
    few = dict(list(benchmark.ASSUMPTIONS.items())[:2])
    monkeypatch.setattr(benchmark, "ASSUMPTIONS", few)
    out = tmp_path / "sim.json"
    benchmark.main(["--quick", "--datasets", "Cora, Products", "--archs", "split,unified", "--out", str(out)])
    result = json.loads(out.read_text())
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert result["benchmark"] == "ascend_sim"
    assert len(result["rows"]) == 2 * 2 * 2 * 4
    for row in result["rows"]:
        assert row["min"] == row["median"] == row["max"] > 0
    summary = load("ascend_sim_summary")
    assert list(result["summary"]) == list(summary.PAPER)
    extra = result["extra"]
    assert set(extra["gains under other assumptions"]["split"]) == set(few)
    assert set(extra["figure 12"]["unified"]["Products"]) == {"10", "20", "30"}
    assert set(extra["figure 11"]["split"]["Products"]) == {"32", "64", "128", "256"}
    assert set(extra["figure 4"]["split"]) == set(load("ascend_sim_order").ORDERS)
    assert len(extra["figure 4"]["split"]["published"]["baseline"]["idle"]) == 48
    assert {"scalar", "vector", "cube"} <= set(extra["figure 5, share of the forward pass"]["split"]["baseline"])
    for orders in extra["epochs"].values():
        for steps in (steps for sets in orders.values() for steps in sets.values()):
            for figures in steps.values():
                alone = figures["utilisation, the cube's tasks alone"]
                assert 0 <= figures["cube busy"] <= alone <= figures["utilisation"] <= 1
    for path in (str(ROOT), str(tmp_path), sys.prefix):
        assert path not in out.read_text()
    assert "gain of each step" in capsys.readouterr().out


def test_nothing_of_the_paper_gets_into_the_model_in_the_published_order(load, monkeypatch):
    benchmark, order = load("ascend_sim"), load("ascend_sim_order")
    graph = load("ascend_sim_epoch").make_graph("Cora", None, 40)
    before = benchmark.gains(machine("unified"), graph)
    monkeypatch.setattr(load("ascend_sim_summary"), "PAPER", dict.fromkeys(benchmark.PAPER, (7.0, 9.0)))
    monkeypatch.setattr(order, "LOAD_RATIO", 9.0)
    assert benchmark.gains(machine("unified"), graph) == before


@given(
    arrays(np.int64, st.integers(60, 300), elements=st.integers(0, 50)), st.floats(0, 1), st.sampled_from([2, 7, 30])
)
def test_an_order_is_a_permutation_between_the_published_one_and_that_by_degree(degrees, lean, ranges):
    order = importlib.import_module("benchmarks.ascend_sim_order")
    ranks = order.ranks(degrees, lean)
    np.testing.assert_array_equal(np.sort(ranks), np.arange(degrees.size))
    np.testing.assert_array_equal(order.ranks(degrees, 0.0), np.arange(degrees.size))
    assert (np.diff(degrees[np.argsort(order.ranks(degrees, 1.0))]) <= 0).all()
    # of two vertices the one that was first and has no fewer edges stays first
    first, second = np.triu_indices(degrees.size, 1)
    kept = degrees[first] >= degrees[second]
    assert (ranks[first[kept]] < ranks[second[kept]]).all()


def test_the_leaning_order_is_fitted_to_the_loads_of_ranges(load):
    order, epoch = load("ascend_sim_order"), load("ascend_sim_epoch")
    degrees = epoch.make_topology("Reddit, smaller", shrink=10).in_degrees.numpy()
    lean = order.fitted_lean(degrees)
    assert 0 < lean < 1
    assert order.load_ratio(degrees) < order.LOAD_RATIO < order.load_ratio(degrees, 1.0)
    assert order.load_ratio(degrees, lean) == pytest.approx(order.LOAD_RATIO, rel=0.02)
    # the graph in that order has those loads, and is the same graph
    leaning = epoch.make_topology("Reddit, smaller", shrink=10, lean=lean).in_degrees.numpy()
    assert order.load_ratio(leaning) == order.load_ratio(degrees, lean)
    np.testing.assert_array_equal(np.sort(leaning), np.sort(degrees))
    assert order.fitted_lean(np.full(300, 5)) == pytest.approx(1, abs=1e-5)  # nothing leans far enough
    assert order.fitted_lean(np.repeat([100, 1], 30)) == 0  # and this does as it is


def test_whatever_is_a_third_apart_has_a_reason_with_numbers(load):
    summary = load("ascend_sim_summary")
    entries = json.loads((ROOT / "benchmarks" / "results" / "ascend_sim.json").read_text())["summary"]
    assert {figure.split(",")[0] for figure in entries} == {"4", "5", "9", "10", "11", "12", "13", "15"}
    for figure, entry in entries.items():
        assert entry["paper"] == list(summary.PAPER[figure])
        for key in ("paper", "simulated", "rows", "published", "split"):
            assert entry[key] is None or 0 < entry[key][0] <= entry[key][1]
        low, high = entry["paper"]
        if low == high:  # an average over data sets
            assert entry["simulated"][0] <= entry["mean"] <= entry["simulated"][1]
            ratio = entry["mean"] / low
        else:
            assert entry["mean"] is None
            ratio = np.sqrt(np.prod(entry["simulated"]) / (low * high))
        assert entry["within"] == (3 / 4 <= ratio <= 4 / 3)
        assert entry["reason"]
        assert entry["within"] or re.search(r"\d", entry["reason"]), figure
    assert "5, " in summary.table(entries)


def test_the_gpu_beside_it_is_a_roofline(load):
    gpu = load("ascend_sim_gpu").gpu_milliseconds
    many = gpu(1000, 10**7, (64, 64))
    assert many == pytest.approx(2 * 1e3 * 10**7 * 65 * 4 / 768e9, rel=0.01)  # of many edges only their rows count
    assert gpu(10**6, 1, (1024, 1024)) == pytest.approx(3 * 1e3 * 2 * 10**6 * 1024**2 / 27.8e12, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--datasets", "Cora,Ogb"], "dataset 'Ogb' is unknown; use some of CiteSeer, Cora"),
        (["--archs", "h100"], "arch 'h100' is unknown; use some of unified, split, split-20"),
    ],
)
def test_bad_input(load, arguments, message):
    with pytest.raises(ValueError, match=message):
        load("ascend_sim").main(["--quick", *arguments])


def test_unknown_dataset(load):
    with pytest.raises(ValueError, match="dataset 'Ogb' is unknown"):
        load("ascend_sim_epoch").make_topology("Ogb")

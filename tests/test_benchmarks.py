"""The benchmarks run and describe what they measured; nothing here looks at how fast anything was."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn.models import GAT, GCN

from lightning_gnn.collective.dispatcher import initial_ratio
from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.planning import MachineLimits

ROOT = Path(__file__).parent.parent
SMALL = {
    "typed_sampling": ["--edges", "4000", "--batch-size", "16", "--batches", "2"],
    "labor": ["--nodes", "200", "--edges", "3000", "--only", "uniform"],
    "sampling": ["--nodes", "500", "--edges", "4000", "--batch-size", "16", "--batches", "3"],
    "minibatch": ["--nodes", "500", "--edges", "4000", "--batch-size", "16", "--batches", "3", "--only", "ours, 1"],
    "epoch": ["--nodes", "500", "--edges", "4000", "--train-nodes", "64", "--batch-size", "16",
              "--only", "ours, SAGE"],
    "plan_cpu": ["--nodes", "500", "--edges", "4000", "--train-nodes", "64", "--only", "ours, GCN, 512 seeds"],
    "aggregate": ["--nodes", "300", "--edges", "2000", "--features", "16", "--only", "plan"],
    "aggregate_update": ["--sources", "60", "--targets", "20", "--fanout", "3", "--features", "8",
                         "--out-features", "8", "--only", "ours, forward, 1"],
    "full_graph": ["--hidden", "8", "--shrink", "200", "--only", "ours, GCN, PubMed"],
    "hyscale": ["--nodes", "500", "--edges", "4000", "--batch-size", "16", "--parts", "ablation",
                "--only", "static hybrid"],
    "collective": ["--nodes", "500", "--edges", "4000", "--batch-size", "16", "--batches", "12",
                   "--cache-nodes", "2000", "--cache-edges", "20000", "--only", "ours, a worker"],
    "time_to_accuracy": ["--shrink", "100", "--only", "ours, make train"],
    "disk": ["--only", "ours, disk, 1/4"],
    "disk_epochs": [],
    "ascend_gathered": [],
    "ascend_max": [],
    "ascend_minibatch": [],
    "convert": ["--only", "ours, memory=1GB"],
    "shared_memory": ["--nodes", "3000", "--edges", "4000", "--most-ranks", "1", "--only", "ours, Neighbor"],
    "partition": ["--nodes", "300", "--edges", "2000", "--only", "ours, ldg"],
    "several_machines": ["--only", "training"],
    "graph_shares": ["--nodes", "3000", "--edges", "300000", "--most-ranks", "1"],
}  # fmt: skip


@pytest.fixture
def load(monkeypatch):
    # The benchmarks are no part of the installed package: they are found from the top of the repository.
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_faults_of_a_mapped_topology_are_counted(load, tmp_path):
    out = tmp_path / "topology_reads.json"
    load("topology_reads").main(["--quick", "--runs", "1", "--out", str(out)])
    asked, read = json.loads(out.read_text())["rows"]
    assert 0 <= asked["median"] <= read["median"], "none of either on a file system in memory"


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_benchmark_describes_what_it_measured(name, load, tmp_path, capsys):
    out = tmp_path / f"{name}.json"
    threads = torch.get_num_threads()
    try:
        load(name).main(["--quick", "--runs", "2", "--out", str(out), *SMALL[name]])
    finally:
        torch.set_num_threads(threads)
    result = json.loads(out.read_text())
    assert result["benchmark"] == name
    assert result["settings"]["runs"] == 2
    assert {"cpu", "cores", "ram_gb", "os", "python", "torch", "numba", "torch_geometric", "pyg_lib", "torch_sparse",
            "torch_threads"} <= set(result["machine"])  # fmt: skip
    ours = [row for row in result["rows"] if row["name"].startswith("ours")]
    assert ours
    for row in ours:
        if row.get("missing") == "does not run":
            continue
        assert len(row["values"]) == 2
        assert 0 < row["min"] <= row["median"] <= row["max"]
    for row in result["rows"]:
        assert ("median" in row) != (row.get("missing") in ("not installed", "does not run"))
    for comparison in result["comparisons"]:
        assert comparison.get("ratio", 1) > 0
        assert ("ratio" in comparison) != ("missing" in comparison)
    for path in (str(ROOT), str(tmp_path), sys.prefix):
        assert path not in out.read_text()
    assert ours[0]["name"] in capsys.readouterr().out


def test_accuracies_of_features_in_fewer_bits_are_compared_seed_by_seed(load):
    sizes = ["--nodes", "300", "--edges", "2000", "--epochs", "1"]
    result = load("transfer_dtype").main(["--quick", "--runs", "2", *sizes])
    accuracies = {row["name"]: sum(row["values"]) / 2 for row in result["rows"]}
    lost = result["extra"]["mean points of accuracy lost against float32"]
    for name in ("float16, synthetic", "int8, synthetic"):
        assert lost[name] == pytest.approx(accuracies["float32, synthetic"] - accuracies[name], abs=0.01)


@pytest.mark.parametrize(("model", "ways"), [("GCN", 3), ("GraphSAGE", 5)])
def test_accuracies_are_compared_seed_by_seed(model, ways, load):
    sizes = ["--nodes", "300", "--edges", "2000", "--epochs", "1", "--full-epochs", "2"]
    result = load("accuracy").main(["--quick", "--runs", "2", "--only", model, *sizes])
    accuracies = {row["name"]: sum(row["values"]) / 2 for row in result["rows"]}
    assert len(accuracies) == ways
    lost = result["extra"]["mean points of accuracy lost against float32"]
    assert len(lost) == ways - 1
    for name, points in lost.items():
        assert points == pytest.approx(accuracies[f"float32, {model}, synthetic"] - accuracies[name], abs=0.01)


def test_variances_of_sampled_means_are_those_of_drawing_without_replacement(load):
    labor = load("labor")
    data = labor.planted_power_law(120, 2400, 4, 3, split=(0.9, 0.05, 0.05))
    sizes = {"batch_size": 36, "fanout": 4}
    degree = torch.bincount(data.edge_index[1], minlength=120)
    mean = labor.means(data.x, data.edge_index, 120)
    spread = torch.zeros(120, 3).index_add_(
        0, data.edge_index[1], (data.x[data.edge_index[0]] - mean[data.edge_index[1]]) ** 2
    )
    # Of a mean of k of d without replacement: (1 - k / d) S^2 / k.
    variance = (1 - 4 / degree).clamp(min=0) / 4 * spread.mean(1) / (degree - 1).clamp(min=1)
    expected = float(variance[data.train_mask].mean())
    for name, sampling in labor.ways(2).items():
        of_target, of_batch = labor.Contestant(data, sizes, sampling).squared_errors(rounds=60)
        # LABOR's targets pick as many, each by itself as uniformly.
        assert of_target == pytest.approx(expected, rel=0.1), name
        if name == "ours, uniform":  # targets' errors are independent
            assert of_batch == pytest.approx(expected, rel=0.15)
        else:
            assert of_batch > 1.2 * expected, name


def test_labor_has_fewer_nodes_per_batch(load):
    labor = load("labor")
    data = labor.planted_power_law(400, 16_000, 4, 3, split=(0.5, 0.2, 0.2))
    found = {
        name: labor.Contestant(data, {"batch_size": 32, "fanout": 4}, sampling).nodes()
        for name, sampling in labor.ways(4).items()
    }
    assert found["ours, LABOR"] < 0.95 * found["ours, uniform"]
    assert found["ours, LABOR, layers depend"] < found["ours, LABOR"]


def test_sampling_reports_what_a_thread_keeps(load):
    contestants = load("sampling_contestants")
    kept = contestants.extra_memory(contestants.make_graph(500, 4000), [torch.arange(16)], [15, 10, 5])
    assert kept["table_bytes_per_node_and_thread"] == 4


def test_phases_of_sampling_are_those_of_the_sampler(load):
    # It raises unless its phases, one after another, give what the sampler gives.
    graph = load("sampling_contestants").make_graph(500, 4000)
    spent = load("sampling_phases").nanoseconds_per_edge(graph, torch.arange(16), [15, 10, 5], runs=1)
    assert all(cost > 0 for cost in spent.values())


def test_epochs_are_compared_with_the_best_settings_of_what_runs(load, monkeypatch):
    epoch = load("epoch")

    class Played:
        def __init__(self, target, spec, rounds):
            self.spec = spec

        def __call__(self, message=True):
            if "precompute" in self.spec:
                return math.inf
            if message is not True:  # a trial, or the settings of the rounds
                return (
                    0.1 / message["torch_threads"] + 0.01 * message["num_workers"] + 0.1 * (message["form"] != "tensor")
                )
            return 1.0 if self.spec["library"] == "ours" else 8.0 + 8.0 * (not self.spec["trim"])

        def close(self):
            pass

    monkeypatch.setattr(epoch, "Isolated", Played)
    monkeypatch.setattr(epoch, "num_cores", lambda: 2)
    monkeypatch.setattr(epoch.peers, "can_sample", lambda: True)
    rows = epoch.run({}, 3, models=("SAGE", "GAT"))
    named = {row["contestant"]: row for row in rows}
    assert named["ours, SAGE"]["name"] == "ours, SAGE, 1 worker, 2 torch threads"
    assert named["PyG, GAT, trimmed"]["name"] == "PyG, GAT, trimmed, 0 workers, 2 torch threads"
    assert named["ours, SAGE, static"]["missing"] == "does not run"
    assert "ours, GAT, static" not in named
    compared = {row["what"]: row for row in epoch.comparisons(rows, "Epoch")}
    assert compared["Epoch, SAGE, against the same with trim_to_layer"]["ratio"] == 8.0
    assert compared["Epoch, SAGE, against PyG's LightningNodeData"]["ratio"] == 16.0
    assert compared["Epoch, GAT, against the same with trim_to_layer"]["target"] == 5.0
    assert compared["Epoch, SAGE, bf16, against ours in float32"]["ratio"] == 1.0
    assert compared["Epoch, SAGE, static, against ours in float32"]["missing"] == "does not run"


def test_roofline_by_hand(load):
    """Two layers, 10 -> 20 -> 5: 1 seed, 2 and 4 new nodes, 3 and 7 edges."""
    batch = Data(x=torch.zeros(7, 10), num_sampled_nodes=[1, 2, 4], num_sampled_edges=[3, 7])
    limits = MachineLimits(1, copy_bandwidth=1e3, gather_bandwidth=1.0, random_read_s=1.0, flops=1e4, flops_bf16=1.0)
    found = load("roofline").roofline(batch, (10, 20, 5), "SAGE", 10, limits)
    # Features 2 x 7 rows of 40 bytes, ids of 10 edges written and read; then edges of 10 and of 5 columns with their
    # ids, the second ones twice, and outputs of 3 rows of 20 and 1 row of 5, four times.
    moved = 2 * 7 * 40 + 2 * 8 * 10 + 10 * (40 + 8) + 4 * 3 * 80 + 2 * 3 * (20 + 8) + 4 * 1 * 20
    flops = 2 * 2 * (3 * 10 * 20 + 3 * 10 * 20) + 2 * 3 * (3 * 20 * 5 + 1 * 20 * 5)
    assert found["ms of bytes"] == pytest.approx(moved, abs=0.01)
    assert found["ms of products"] == pytest.approx(1e3 * flops / 1e4, abs=0.01)
    assert found["bound s"] == pytest.approx(10 * (moved / 1e3 + flops / 1e4), abs=1e-3)


def test_quick_run_writes_no_file(load):
    harness = load("harness")
    assert harness.parse("sampling", "", {"nodes": (10, 5)}, ["--quick"]).out is None
    full = harness.parse("sampling", "", {"nodes": (10, 5)}, [])
    assert full.out == harness.RESULTS / "sampling.json"
    assert full.sizes == {"nodes": 10}


def test_rounds_are_interleaved_and_the_first_does_not_count(load):
    harness, calls = load("harness"), []

    def contestant(name, figures):
        return lambda: calls.append(name) or figures.pop(0)

    rows = harness.measure(
        {"a": contestant("a", [9.0, 1.0, 3.0, 2.0]), "b": contestant("b", [9.0, 4.0, 4.0, 8.0]), "c": None}, runs=3
    )
    assert "".join(calls) == "abababab"
    assert rows[0] == {"name": "a", "median": 2.0, "min": 1.0, "max": 3.0, "values": [1.0, 3.0, 2.0]}
    assert rows[2] == {"name": "c", "missing": "not installed"}
    assert harness.compare(rows, "", ["a"], ["b"], higher_is_better=False)["ratio"] == 2.0
    assert harness.compare(rows, "", ["a"], ["b"], higher_is_better=True)["ratio"] == 0.5
    assert harness.compare(rows, "", ["a"], ["c"], higher_is_better=True)["missing"] == "not installed"
    drifting = [
        {"name": "a", "median": 20.0, "values": [11.0, 22.0, 20.0]},
        {"name": "b", "median": 21.0, "values": [10.0, 21.0, 40.0]},
    ]
    assert harness.compare(drifting, "", ["a"], ["b"], False, by_rounds=True)["ratio"] == pytest.approx(
        21 / 22, rel=1e-3
    )
    assert harness.compare(drifting, "", ["a"], ["b"], True, by_rounds=True)["ratio"] == pytest.approx(
        22 / 21, rel=1e-3
    )


def test_intervals_of_ratios_hold_the_true_one_in_19_of_20_runs(load):
    """Five rounds of a machine that drifts, by which neither contestant may look faster; the ratio of both is 1.25."""
    intervals, source, held = load("intervals"), random.Random(0), 0
    for _ in range(4000):
        drift = [source.lognormvariate(0, 1) for _ in range(5)]
        ours, peer = ([speed * source.lognormvariate(0, 0.05) * each for each in drift] for speed in (1.25, 1.0))
        found = intervals.ratio_of_rounds(ours, peer)
        held += found.low <= 1.25 <= found.high
        assert found.low <= found.ratio <= found.high
    assert held / 4000 == pytest.approx(0.95, abs=0.011)  # three standard deviations


def test_intervals_of_ratios_by_hand(load):
    ratio_of_rounds = load("intervals").ratio_of_rounds
    found = ratio_of_rounds([math.e, math.e**3], [1.0, 1.0])  # logarithms 1 and 3: t is 12.706, the standard error 1
    assert [math.log(each) for each in found] == pytest.approx([2.0, 2 - 12.7062, 2 + 12.7062], rel=1e-4)
    assert ratio_of_rounds([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.0, 2.0))
    there, back = ratio_of_rounds([3.0, 5.0, 4.0], [1.0, 2.0, 1.5]), ratio_of_rounds([1.0, 2.0, 1.5], [3.0, 5.0, 4.0])
    assert back == pytest.approx((1 / there.ratio, 1 / there.high, 1 / there.low))
    assert ratio_of_rounds([1.0], [2.0]) is None
    for over, under in (([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1.0])):
        with pytest.raises(ValueError, match="as many, and positive"):
            ratio_of_rounds(over, under)


def test_rows_and_comparisons_have_intervals(load):
    intervals, harness = load("intervals"), load("harness")
    rows = harness.measure({"a": iter([1.0, 2.0, 4.0, 3.0]).__next__, "b": iter([1.0, 1.0, 2.0, 1.6]).__next__}, runs=3)
    found = intervals.ratio_of_rounds([2.0, 4.0, 3.0], [1.0, 2.0, 1.6])
    compared = harness.compare(rows, "", ["b"], ["a"], higher_is_better=False)
    assert compared["interval"] == pytest.approx([found.low, found.high], rel=1e-3)
    assert compared["interval"][0] < compared["ratio"] < compared["interval"][1]
    intervals.add_ratios([*rows, {"name": "c", "missing": "not installed"}], "a", higher_is_better=False)
    assert (rows[1]["against"], rows[1]["interval"]) == ("a", compared["interval"])
    assert rows[1]["speedup"] == pytest.approx(found.ratio, rel=1e-3)
    assert "speedup" not in rows[0]


def _fail(spec, gate):
    gate.wait()
    raise ValueError(f"broken {spec['what']}")


@pytest.mark.slow
def test_failing_contestant_says_why(load):
    contestant = load("harness").Isolated(_fail, {"what": "contestant"}, rounds=2)
    with pytest.raises(RuntimeError, match="broken contestant"):
        contestant()
    contestant.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_gpu_benchmark_says_that_there_is_no_gpu(load, capsys):
    assert load("gpu").main([]) == []
    assert capsys.readouterr().out.count("\n") == 1


def test_gpu_benchmark_knows_all_sizes_of_its_contestants(load):
    sizes = {**load("minibatch").SIZES, **{name: load("epoch").SIZES[name] for name in ("hidden", "train_nodes")}}
    assert set(load("epoch").SIZES) <= set(sizes)


def test_tables_in_readme_and_docs_are_made_from_the_results(load):
    report = load("report")
    for path, content in report.pages(report.load()).items():
        text = path.read_text(encoding="utf-8")
        assert report.replaced(text, content) == text, "run python -m benchmarks.report"


def test_table_has_a_line_per_comparison(load):
    report = load("report")
    machine = {"python": "3", "torch": "2", "torch_geometric": "2", "pyg_lib": "0", "torch_sparse": "not installed",
               "cores": 2, "cpu": "some", "os": "Linux"}  # fmt: skip
    compared = {"what": "Sampling", "ours": "ours", "peer": "pyg-lib", "medians": [30.0, 5.0], "ratio": 6.0}
    result = {"title": "T", "unit": "M/s", "settings": {"runs": 5}, "machine": machine,
              "comparisons": [compared, {"what": "Other", "missing": "not installed"}]}  # fmt: skip
    content = report.table([result])
    assert "| Sampling | 30 M/s (ours) | 5 M/s (pyg-lib) | **6x** |" in content
    assert "| Other | | not installed | |" in content
    sure = report.table([{**result, "comparisons": [{**compared, "interval": [5.4, 6.6]}]}])
    assert "| 5 M/s (pyg-lib) | **6x** (5.4 to 6.6) |" in sure
    text = f"before\n{report.START}\nold\n{report.END}\nafter"
    assert report.replaced(text, content) == f"before\n{report.START}\n{content}\n{report.END}\nafter"
    with pytest.raises(ValueError, match="both lines"):
        report.replaced("no markers", content)
    short = report.headlines([{**result, "comparisons": [compared, {**compared, "what": "Third"}]}], ["Third"])
    assert [line.split(" |")[0] for line in short.splitlines()[2:3]] == ["| Third"]
    assert short.splitlines()[3:] == ["", f"- M{report._machine(result)[1:]}"]
    with pytest.raises(KeyError, match="Fourth"):
        report.headlines([result], ["Fourth"])


def test_the_aggregation_benchmark_reports_loads_and_the_cost_of_the_partition(load, tmp_path):
    benchmark = load("aggregate")
    spec = {"nodes": 20_000, "edges": 200_000, "features": 32}
    loads = benchmark.loads(spec, workers=4)
    for name in ("ranges of vertices", "ranges of equally many chunks", "hybrid plan"):
        assert sum(loads[name]) == 200_000 * 32
        assert loads[f"max/mean, {name}"] >= 1
    assert loads["max/mean, hybrid plan"] <= 1.05
    benchmark.draw(loads, tmp_path / "load.png")
    assert (tmp_path / "load.png").stat().st_size > 1000
    cost = benchmark.partition_cost(spec)
    assert cost["num_edges"] == 200_000
    assert cost["rows_loaded"] <= cost["natural_rows_loaded"]


@pytest.fixture
def float64():
    """Make torch's default float64."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(previous)


@pytest.mark.parametrize(
    ("model", "moved", "flops"),
    [
        # 1,000 edges and 100 nodes pass twice through 4 columns; outputs of 16 and 4 columns.
        ("GCN", 2 * 1100 * (4 * 4 + 8) + 4 * 100 * 4 * (16 + 4), 2 * 100 * (8 * 16 * 2 + 16 * 4 * 3)),
        # Three times through 16 columns, and again for two heads of 4; outputs of 16 and 8.
        ("GAT", 3 * 1100 * (16 * 4 + 8 + 8 * 4 + 8) + 4 * 100 * 4 * (16 + 8), 2 * 100 * (8 * 16 * 2 + 16 * 8 * 3)),
    ],
)
def test_full_graph_roofline_counts_by_hand(model, moved, flops, load):
    limits = MachineLimits(2, copy_bandwidth=1e6, gather_bandwidth=1.0, random_read_s=1.0, flops=2e6, flops_bf16=1.0)
    found = load("roofline").full_graph_roofline(100, 1000, (8, 16, 4), model, 2, limits)
    assert found["bound ms"] == pytest.approx((moved + flops / 2) / 1e3, rel=1e-3)


@pytest.mark.parametrize("model", ["GCN", "GAT"])
def test_peers_of_full_graph_training_compute_the_same(model, load, float64):
    peers = load("full_graph_peers")
    data = peers.make_graph("PubMed", 100)
    outputs = {}
    for name in filter(peers.installed, peers.PEERS[model]):
        torch.manual_seed(0)
        peer = peers.make_peer(model, name, data.num_features, 8, 2, 3, dropout=0.0).double()
        x = data.x.double().requires_grad_()
        out = peer(x, data.edge_index)
        out.square().sum().backward()
        outputs[name] = out.detach(), x.grad, *(parameter.grad for parameter in peer.parameters())
    assert len(outputs) >= 2
    expected = outputs["PyG, edge_index"]
    kind = {"GCN": GCN, "GAT": GAT}[model]
    torch.manual_seed(0)
    plain = kind(data.num_features, 8, 2, 3, dropout=0.0).double()
    torch.testing.assert_close(plain(data.x.double(), data.edge_index), expected[0], rtol=1e-10, atol=1e-10)
    for name, values in outputs.items():
        for value, wanted in zip(values, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10, msg=name)


HYSCALE_NOTES = {
    "stages": {"sample_cpu": 0.02, "load": 0.01, "train_cpu": 0.2},
    "seeds": [1000],
    "threads": [1, 1, 2],
    "workload": {
        "num_vertices": 10_000, "num_edges": 100_000, "num_train": 5_000, "batch_size": 1000, "fanouts": [10, 5],
        "widths": [100, 64, 8], "feature_bytes": 4, "index_bytes": 8, "update_inputs": 2,
        "measured": {"seeds": 1000, "vertices": [9000.0, 5000.0, 1000.0], "edges": [30_000.0, 9_000.0]},
    },
    "platform": {
        "cpu": {"flops": 1e11, "memory_bandwidth": 1e10, "pipelined": False}, "cores": 4,
        "accelerator": {"flops": 1e12, "memory_bandwidth": 1e11, "pipelined": False}, "num_accelerators": 1,
        "sampling": 1e7, "core_bandwidth": 5e9,
    },
}  # fmt: skip


@pytest.mark.parametrize("seconds", [0.2, 0.002])
def test_the_performance_model_of_the_hybrid_benchmark_repeats_what_was_measured(seconds, load):
    benchmark = load("hyscale_model")
    notes = {**HYSCALE_NOTES, "stages": {**HYSCALE_NOTES["stages"], "train_cpu": seconds}}
    platform = benchmark.with_accelerator(benchmark.calibrated(notes), threads=2, speed=4.0, link=1e9)
    model = benchmark.PerformanceModel(platform, benchmark.workload_of(notes))
    times = model.stage_times(benchmark.TaskMapping((1000, 0), 1, (1, 1, 2)))
    assert times.train_cpu[0] == pytest.approx(seconds)
    assert times.sample_cpu == pytest.approx(0.02)
    if seconds == 0.2:  # else its bandwidth is higher than that of Feature Loading
        assert times.load == pytest.approx(0.01)
    there = model.stage_times(benchmark.TaskMapping((0, 1000), 1, (1, 1, 2)))
    assert there.train_accelerator[0] == pytest.approx(seconds / 4)
    assert there.transfer == pytest.approx(benchmark.transferred_bytes(benchmark.workload_of(notes)) / 1e9)
    split = benchmark.TaskMapping((500, 500), 1, (1, 1, 2))
    half = model.stage_times(split)
    assert benchmark.predicted(model, split, 1) == max(half.iteration, half.load + half.transfer)
    assert benchmark.predicted(model, split, 2) == half.iteration
    alone = benchmark.TaskMapping((1000,), 0, (1, 1, 0))
    assert benchmark.predicted(model, alone, 2) == pytest.approx(max(seconds / 4, there.transfer, 0.02))


class _Ranks:
    def __init__(self, rank):
        self.global_rank = rank


def _paced(load, rank, **options):
    """Gradients of a step of the hybrid benchmark's model on one rank."""
    simulated = load("simulated_accelerator")
    batch = load("hyscale_contestants").Data(
        x=torch.rand(6, 4), y=torch.arange(6), edge_index=torch.tensor([[3, 4, 5], [0, 1, 2]]), batch_size=3
    )
    torch.manual_seed(0)
    module = simulated.PacedClassifier(load("hyscale_contestants").GraphSAGE(4, 8, 2, simulated.CLASSES), **options)
    module._trainer = _Ranks(rank)
    module.training_step(batch, 0).backward()
    return [parameter.grad for parameter in module.parameters()]


def test_the_hybrid_benchmark_waits_for_its_accelerator_and_changes_no_gradient(load, monkeypatch):
    launches = []
    monkeypatch.setattr(load("simulated_accelerator"), "launch", lambda *what: launches.append(what))
    torch.manual_seed(1)
    state = torch.get_rng_state()

    def gradients(rank, **options):
        torch.set_rng_state(state)
        return _paced(load, rank, **options)

    plain = gradients(0)
    assert any(gradient.any() for gradient in plain)
    assert not launches
    for rank, options in ((0, {"accelerator": True}), (1, {"accelerator": True, "simulated": True})):
        slowed = gradients(rank, seconds_per_seed=0.02, **options)
        assert all(torch.equal(one, other) for one, other in zip(plain, slowed, strict=True))
    assert [kernels for kernels, _ in launches] == [
        0,
        0,
    ]  # a real one launches its own; a CPU trainer waits for nothing
    assert [seconds for _, seconds in launches] == pytest.approx([0.02, 0.04])
    simulated = gradients(0, accelerator=True, simulated=True, seconds_per_seed=0.02)
    assert all(gradient is not None and not gradient.any() for gradient in simulated)
    assert sum(kernels for kernels, _ in launches) == load("simulated_accelerator").KERNELS
    assert sum(seconds for _, seconds in launches[2:]) == pytest.approx(0.06)


def test_launches_hold_the_interpreter_and_waits_release_it(load, monkeypatch):
    simulated, now, waits = load("simulated_accelerator"), [0.0], []

    def clock():
        now[0] += 1e-6  # each look takes a microsecond
        return now[0]

    monkeypatch.setattr(simulated.time, "perf_counter", clock)
    monkeypatch.setattr(simulated.time, "sleep", waits.append)
    simulated.launch(100, 0.01)
    assert now[0] == pytest.approx(100 * simulated.LAUNCH, rel=0.02)
    assert waits == pytest.approx([0.01 - 100 * simulated.LAUNCH], rel=0.02)
    simulated.launch(100, 0.0005)  # the device is done before the host
    assert len(waits) == 1


def test_a_core_is_taken_away_and_given_back(load):
    simulated = load("simulated_accelerator")
    disturbance, module = simulated.Disturbance(6), simulated.PacedClassifier(torch.nn.Identity())
    for kind, rank in (("core", 0), ("core", 1), ("accelerator", 0), ("calm", 0), (None, 0)):
        disturbance.kind, seen = kind, []
        for index in range(6):
            disturbance.on_train_batch_start(_Ranks(rank), module, None, index)
            burner = disturbance._burner
            seen.append((burner is not None and burner.poll() is None, module.slowness))
        disturbed = [index in (2, 3) and rank == 0 for index in range(6)]
        assert [core for core, _ in seen] == [each and kind == "core" for each in disturbed]
        assert [factor for _, factor in seen] == [2.5 if each and kind == "accelerator" else 1.0 for each in disturbed]


def _hybrid_benchmark(load, monkeypatch, milliseconds):
    """The hybrid benchmark with contestants that take what they are said to take, 1 % longer in each round."""
    benchmark = load("hyscale")

    def compete(common, contestants, runs, kinds=(None,)):
        found = []
        for index in range(len(next(iter(contestants.values())).get("fits", [{}]))):
            rows = []
            for name in contestants:
                for kind in kinds:
                    values = [milliseconds(name, kind, index) * 1.01**turn for turn in range(runs)]
                    label = name if kind is None else f"{name}, {kind}"
                    rows.append({"name": label, "values": values, "median": values[runs // 2], "min": min(values),
                                 "max": max(values)})  # fmt: skip
            hybrid = {"shares": [0.2, 0.8], "first_shares": [0.2, 0.8], "seeds": None, "decisions": []}
            alone = {"shares": [1.0], "first_shares": [1.0], "seeds": None}
            noted = {name: {} if name == "CPU" else alone if "only" in name else hybrid for name in contestants}
            notes = {name: {**HYSCALE_NOTES, **own} for name, own in noted.items()}
            found.append((rows, notes))
        return found

    monkeypatch.setattr(benchmark, "compete", compete)
    return benchmark


def test_the_hybrid_benchmark_compares_round_by_round_and_keeps_what_other_parts_have_left(load, monkeypatch, tmp_path):
    def milliseconds(name, kind, index):
        if name == "accelerator alone":
            return 30.0
        if name == "CPU trainer alone":
            return 40.0
        if name.startswith("hybrid"):
            return 50.0
        slower = {"core": 1.5, "accelerator": 2.0 if "static" in name else 1.25}.get(kind, 1.0)
        return 10.0 * slower * {"cpu_share=0.15": 0.9, "cpu_share=0.2": 1.1}.get(name, 1.0)

    benchmark, out = _hybrid_benchmark(load, monkeypatch, milliseconds), tmp_path / "hyscale.json"
    sizes = ["--quick", "--batch-size", "90", "--runs", "3", "--out", str(out)]
    first = benchmark.main([*sizes, "--parts", "sum,disturbance,sweep"])
    rates = first["parts"]["sum"]["comparisons"][0]
    # 60 seeds in 30 ms and 30 in 40 ms, together 2.75 per ms; the hybrid 90 in 50 ms
    assert rates["ratio"] == pytest.approx(90 / 50 / (60 / 30 + 30 / 40), rel=1e-3)
    assert rates["interval"] == pytest.approx([rates["ratio"]] * 2, rel=1e-3)
    lost = first["parts"]["disturbance"]["time lost"]
    assert lost["core"]["ours, + DRM"]["part"] == pytest.approx(0.5)
    assert lost["accelerator"]["ours, static hybrid"]["part"] == pytest.approx(1.0)
    assert lost["accelerator"]["ours, + DRM"]["part"] == pytest.approx(0.25)
    gained = {each["what"]: each["ratio"] for each in first["parts"]["disturbance"]["comparisons"]}
    assert gained["Training while disturbed (accelerator), DRM against a static mapping"] == pytest.approx(1.6)
    swept = first["parts"]["sweep"]["comparisons"][0]
    assert swept["peer"] == "cpu_share=0.15"
    assert swept["ratio"] == pytest.approx(0.9)
    assert first["parts"]["sweep"]["picked"]["cpu_share='auto'"] == 0.2
    second = benchmark.main([*sizes, "--parts", "lone"])
    assert json.loads(out.read_text()) == json.loads(json.dumps(second))
    assert list(second["parts"]) == ["sum", "disturbance", "sweep", "lone"]
    assert second["parts"]["sum"] == first["parts"]["sum"]
    assert len(second["rows"]) == len(first["rows"]) + 4
    with pytest.raises(SystemExit, match="nonsense"):
        benchmark.main(["--quick", "--parts", "nonsense"])


def test_the_ablation_sets_predictions_beside_what_was_measured(load, monkeypatch):
    benchmark = _hybrid_benchmark(load, monkeypatch, lambda name, kind, index: 100.0 if "only" in name else 80.0)
    monkeypatch.setattr(benchmark, "able", lambda spec: True)
    result = benchmark.main(["--quick", "--batch-size", "1000", "--runs", "2", "--parts", "ablation"])
    shown = result["parts"]["ablation"]["figure_11"]["2x the CPU trainer"]
    assert set(shown) == set(benchmark.VARIANTS) - {benchmark.PYG}
    for entry in shown.values():
        for which in ("calibrated", "not calibrated"):
            error = 100 * (entry[f"predicted_ms, {which}"] / entry["ms"] - 1)
            assert entry[f"error_percent, {which}"] == pytest.approx(error, abs=0.1)
    ratios = {each["what"].split(", ", 2)[2]: each["ratio"] for each in result["comparisons"]}
    assert ratios["against it alone"] == pytest.approx(1.25)
    assert ratios["what DRM gains"] == pytest.approx(1.0)
    row = next(row for row in result["rows"] if row["name"].startswith(benchmark.HYBRID))
    assert (row["speedup"], row["against"]) == (1.25, f"{benchmark.ALONE}, 2x the CPU trainer")


@pytest.mark.slow
def test_a_script_that_fails_says_why(load, tmp_path):
    scripts = load("scripts")
    with pytest.raises(RuntimeError, match=r"(?s)exit code 1.*KeyError: 'nodes'") as error:
        scripts.Script("benchmarks.hyscale_contestants", {}, tmp_path, "broken")
    assert "Traceback" in str(error.value)


@pytest.mark.slow
def test_the_hybrid_benchmark_needs_no_hydra():
    check = "import sys, benchmarks.hyscale; assert 'hydra' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_figure_of_hybrid_training_is_drawn(load, tmp_path):
    benchmark, name = load("hyscale_model"), "2x the CPU trainer"
    study = benchmark.scaling(quick=True)
    for points in study["accelerators"].values():
        assert [point["accelerators"] for point in points] == [1, 4]
    assert all(points[0]["speedup"] == 1 for points in study["nodes"].values())
    benchmark.draw({name: {"ours, accelerator only": 1.0, "ours, + DRM": 1.4}}, study, tmp_path / "hyscale.png")
    assert (tmp_path / "hyscale.png").stat().st_size > 1000


def test_a_disturbed_loader_sleeps_as_it_should(load):
    disturbed = load("collective_disturbed")
    times = StageTimes(*[Duration(0.001)] * 5, cpu_workers=2)
    plan = disturbed.plan_for(times, 12)
    seconds = disturbed.epochs(times, 3.0, 12, plan, replan=True)
    assert len(seconds) == disturbed.BEFORE + disturbed.AFTER
    assert min(seconds) > 12 * 0.001


@pytest.mark.slow
def test_the_stages_of_the_sleeping_machine_give_the_epochs_they_were_solved_from(load):
    simulated = load("collective_simulated")
    for setting in (simulated.UK, simulated.PAPERS):
        times = setting.times(setting.cores)
        assert times.cpu * setting.num_batches == pytest.approx(setting.epochs["CPU-only"])
        assert (times.gpu + times.model.mean) * setting.num_batches == pytest.approx(setting.epochs["GPU-only"])
        assert initial_ratio(times) == pytest.approx(setting.ratio)
    found = {cell["cores"]: cell["simulated_s"] for cell in simulated.simulated_epochs()}
    for way in ("CPU-only", "GPU-only"):
        assert found[simulated.UK.cores][way] == pytest.approx(simulated.UK.epochs[way], rel=0.02)
    assert all(epochs["collective"] < min(epochs["CPU-only"], epochs["GPU-only"]) for epochs in found.values())
    points = {point["gpu_buffer_size"]: point for point in simulated.simulated_buffers(2_000, 20_000)["points"]}
    assert points[1]["cache_rows"] > points[128]["cache_rows"] > 0
    small = [points[size]["simulated_s"] for size in (1, 2, 4, 8, 10)]
    assert max(small) == pytest.approx(min(small), rel=0.01)
    assert 1.05 * max(small) < points[128]["simulated_s"]


WAYS = {
    "collective": lambda machine: machine.collective(CollectivePlan("collective", 4, 3)),
    "CPU-only": lambda machine: machine.cpu_only(),
    "GPU-only": lambda machine: machine.gpu_only(),
    "random split": lambda machine: machine.random_split(0.5),
    "all by the GPU": lambda machine: machine.random_split(0.0),
    "all by the CPU": lambda machine: machine.random_split(1.0),
}


@pytest.mark.campaign
@pytest.mark.parametrize("way", WAYS)
def test_the_sleeping_machine_trains_each_mini_batch_once_and_in_order(way, load):
    times = load("collective_simulated").UK.times(4, 1 / 100)
    before = set(threading.enumerate())
    machine = load("collective_scripted").SleepingMachine(times, 21)
    timeline = WAYS[way](machine)
    assert not set(threading.enumerate()) - before  # those of the test before may end meanwhile
    stages = {name: [item for item in timeline.intervals if item.stage == name and item.resource != "PCIe"]
              for name in ("cpu_batching", "uva", "model")}  # fmt: skip
    assert [item.batch for item in stages["model"]] == list(range(21))
    on_cpu, on_gpu = ({item.batch for item in stages[name]} for name in ("cpu_batching", "uva"))
    assert on_cpu | on_gpu == set(range(21))
    assert not on_cpu & on_gpu
    share = {"CPU-only": 1, "all by the CPU": 1, "GPU-only": 0, "all by the GPU": 0}
    if way in share:
        assert len(on_cpu) == 21 * share[way]
    else:
        assert on_cpu
        assert on_gpu
    assert {item.lane for item in stages["cpu_batching"]} <= {0, 1, 2}
    transferred = [item.batch for item in timeline.intervals if item.stage == "dma"]
    assert transferred == sorted(on_cpu)
    for resource in ("PCIe", "GPU"):
        spans = sorted((item.start, item.end) for item in timeline.intervals if item.resource == resource)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_lines_about_collective_batching_are_about_the_right_numbers_of_cores(load):
    benchmark = load("collective")
    figures = {2: (10.0, 90.0, 11.0), 4: (8.0, 12.0, 11.0), 8: (7.1, 7.0, 11.0)}
    names = {cores: {way: [f"{way} {cores}"] for way in ("collective", "CPU-only", "GPU-only", "random split")}
             for cores in figures}  # fmt: skip
    rows = [{"name": name, "median": median} for cores, medians in figures.items()
            for name, median in zip((f"{way} {cores}" for way in names[cores]), medians, strict=False)]  # fmt: skip
    lines = benchmark.comparisons(rows, names, "Some")
    assert [line["what"].split(", ")[-1] for line in lines] == ["8 cores", "4 cores", "2 cores", "8 cores"]
    assert [line["ratio"] for line in lines] == pytest.approx([7.0 / 7.1, 11 / 8, 9.0, 11 / 7.1], rel=1e-3)
    assert [line["peer"] for line in lines] == ["CPU-only 8", "GPU-only 4", "CPU-only 2", "GPU-only 8"]


@pytest.mark.slow
def test_a_cell_of_the_collective_benchmark_measures_all_ways(load, tmp_path):
    benchmark, gpu = load("collective"), load("collective_gpu")
    sizes = {"nodes": 400, "edges": 3000, "features": 4, "batch_size": 16, "batches": 24, "cache_rows": 0}
    bench = gpu.Bench(sizes, torch.device("cpu"), profile_batches=2)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    threads, running = torch.get_num_threads(), threading.active_count()

    with gpu.kept_on(2):
        loader = bench.loader(bench.shared, 1)
        loader.plan = gpu.CollectivePlan("gpu", 1, 0)
        wanted = [batch.n_id for batch in loader]
        for ratio in (0.0, 0.5, 1.0):
            found = [batch.n_id for batch in bench.random_split(loader, ratio, 1)]
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert all(torch.equal(one.n_id, other) for one, other in zip(bench.cpu_only(1), wanted, strict=True))
        assert all(torch.equal(one.n_id, other) for one, other in zip(loader.route, wanted, strict=True))
        loader.close()

    result = {"cells": [bench.cell("GCN", 2, 2)], "figure 9": {"GCN": bench.buffers("GCN", 2, 4, 1)}}
    if cores is not None:
        assert os.sched_getaffinity(0) == cores
    assert torch.get_num_threads() == threads
    assert threading.active_count() == running
    benchmark.finish(result)
    ways = ("collective", "CPU-only, PrefetchLoader", "CPU-only, the loader's ring", "GPU-only", "random split")
    assert [row["name"] for row in result["rows"]] == [
        f"{'ours, ' * (way == 'collective')}{way}, GCN, 2 cores" for way in ways
    ]
    assert len(result["comparisons"]) == 5
    cell = result["cells"][0]
    assert cell["planning"]["batches"] > 0
    assert set(cell["utilisation"]) == {"collective", "CPU-only", "GPU-only"}
    points = result["figure 9"]["GCN"]["points"]
    assert points[0]["cache_rows"] > points[-1]["cache_rows"] >= 0
    load("collective_simulated").draw(result, tmp_path / "collective.png")
    assert (tmp_path / "collective.png").stat().st_size > 1000
    json.dumps(result)


@pytest.mark.slow
def test_planners_are_judged_on_epochs_that_they_have_not_seen(load, tmp_path):
    out = tmp_path / "found.json"
    result = load("collective_planner").main(["--quick", "--out", str(out)])
    assert json.loads(out.read_text())["extra"] == json.loads(json.dumps(result["extra"]))
    against, without = result["extra"]["against"], result["extra"]["against the best of them, without"]
    peers = {"the authors'", "the CPU alone", "the GPU alone", "brute force", "the best of them"}
    assert peers | set(load("collective_planner").WITHOUT) == set(against)
    assert {against[name]["settings"] for name in peers} == {3}
    assert against["the best of them"]["worst"] == max(against[name]["worst"] for name in peers) < 1.05
    assert {name.partition(",")[0] for name in without} == {"ours", *load("collective_planner").WITHOUT}
    assert sum(found["settings"] for name, found in without.items() if name.startswith("ours,")) >= 2


def test_parts_of_the_resource_manager_are_switched_off(load, tmp_path):
    out = tmp_path / "found.json"
    benchmark = load("resource_manager")
    result = benchmark.main(["--quick", "--runs", "1", "--iterations", "90", "--out", str(out)])
    assert json.loads(out.read_text()) == result
    assert set(result["results"]) == set(benchmark.WAYS)
    assert all(found["mean"] >= 0 for found in result["results"].values())
    assert result["results"]["ours"]["bad first mapping"] < result["results"]["no manager"]["bad first mapping"] / 2

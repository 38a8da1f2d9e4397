"""The benchmarks run and describe what they measured; nothing here looks at how fast anything was."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SMALL = {
    "sampling": ["--nodes", "500", "--edges", "4000", "--batch-size", "16", "--batches", "3"],
    "minibatch": ["--nodes", "500", "--edges", "4000", "--batch-size", "16", "--batches", "3", "--only", "ours, 1"],
    "epoch": ["--nodes", "500", "--edges", "4000", "--train-nodes", "64", "--batch-size", "16",
              "--only", "ours, 2 workers, 1 torch"],
    "aggregate": ["--nodes", "300", "--edges", "2000", "--features", "16", "--only", "plan"],
    "aggregate_update": ["--sources", "60", "--targets", "20", "--fanout", "3", "--features", "8",
                         "--out-features", "8", "--only", "ours, forward, 1"],
    "full_graph": ["--hidden", "8", "--shrink", "200", "--only", "ours, GCN, PubMed"],
}  # fmt: skip


@pytest.fixture
def load(monkeypatch):
    # The benchmarks are no part of the installed package: they are found from the top of the repository.
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


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
        assert len(row["values"]) == 2
        assert 0 < row["min"] <= row["median"] <= row["max"]
    for row in result["rows"]:
        assert ("median" in row) != (row.get("missing") == "not installed")
    for comparison in result["comparisons"]:
        assert comparison.get("ratio", 1) > 0
        assert ("ratio" in comparison) != ("missing" in comparison)
    for path in (str(ROOT), str(tmp_path), sys.prefix):
        assert path not in out.read_text()
    assert ours[0]["name"] in capsys.readouterr().out


def test_sampling_reports_what_a_thread_keeps(load):
    sampling = load("sampling")
    indptr, indices = sampling.power_law_graph(500, 4000, seed=0)
    graph = sampling.CSCGraph.from_csc(indptr, indices.int())
    assert sampling.extra_memory(graph, [torch.arange(16)])["table_bytes_per_node_and_thread"] == 8


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


def _fail(spec, gate):
    gate.wait()
    raise ValueError(f"broken {spec['what']}")


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


def test_readme_table_is_made_from_the_results(load):
    report, readme = load("report"), ROOT / "README.md"
    results = report.load()
    if not results or not readme.exists() or report.START not in readme.read_text(encoding="utf-8"):
        pytest.skip("no results, or no README with a table")
    text = readme.read_text(encoding="utf-8")
    assert report.replaced(text, report.table(results)) == text, "run python -m benchmarks.report"


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
    text = f"before\n{report.START}\nold\n{report.END}\nafter"
    assert report.replaced(text, content) == f"before\n{report.START}\n{content}\n{report.END}\nafter"
    with pytest.raises(ValueError, match="README"):
        report.replaced("no markers", content)


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


def test_the_sweeps_of_full_graph_training_are_drawn(load, tmp_path):
    benchmark = load("full_graph")
    rows = [
        {"name": f"{library}, GCN, PubMed, hidden {hidden}", "median": 1.0}
        for library in benchmark.LIBRARIES["GCN"]
        for hidden in (32, 64)
    ]
    benchmark.draw({"against hidden size": rows}, tmp_path / "sweeps.png")
    assert (tmp_path / "sweeps.png").stat().st_size > 1000

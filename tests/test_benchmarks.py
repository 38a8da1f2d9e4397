"""The benchmark harness interleaves rounds and reports confidence intervals; two scripts describe their results.

No test depends on measured speed.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.refusals import refuses

ROOT = Path(__file__).parent.parent
SMALL = {
    "sampling": ["--nodes", "500", "--edges", "4000", "--batch-size", "16", "--batches", "3"],
    "epoch": ["--nodes", "500", "--edges", "4000", "--train-nodes", "64", "--batch-size", "16",
              "--only", "ours, SAGE"],
}  # fmt: skip
MODULES = {"sampling": "sampling.neighbors", "epoch": "models.epoch"}


@pytest.fixture
def load(monkeypatch):
    # The benchmarks are not installed; they are imported from the root of the repository.
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_the_output_folder_is_checked_first(load, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    given = ["--quick", f"--out={tmp_path}/file/new.json"]
    refuses(SystemExit, "2", load("harness").parse, "some", "a benchmark", {}, given)
    refuses(SystemExit, "2", load("papers.page").parse, "some", "a paper", given)
    assert capsys.readouterr().err.count(f"the folder of --out={tmp_path}/file cannot be used") == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_benchmark_describes_what_it_measured(name, load, tmp_path, capsys):
    out = tmp_path / f"{name}.json"
    threads = torch.get_num_threads()
    try:
        load(MODULES[name]).main(["--quick", "--runs", "2", "--out", str(out), *SMALL[name]])
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


def take_turns(spec, gate):
    for turn in range(gate.rounds):
        message = gate.wait()
        spec["seen"].append((message, turn))
        if message == "fail":
            raise ValueError("as told")
        gate.report(spec["figure"] + turn)


def test_contestants_in_threads_take_turns_and_fail_alone(load):
    harness, seen = load("harness"), []
    first, second = (harness.InThread(take_turns, {"figure": figure, "seen": seen}, 3) for figure in (10, 20))
    assert [first("a"), second("b"), first("c")] == [10, 20, 11]
    assert seen == [("a", 0), ("b", 0), ("c", 1)]
    with pytest.raises(RuntimeError, match="as told"):
        first("fail")
    assert second("d") == 21
    for contestant in (first, second):
        contestant.close()
        assert not contestant._thread.is_alive()


def test_a_silent_contestant_has_failed(load):
    harness, let_go = load("harness"), threading.Event()
    silent = harness.InThread(lambda spec, gate: (gate.wait(), let_go.wait()), {}, 1)
    silent.limit = 0.01
    with pytest.raises(RuntimeError, match="said nothing"):
        silent()
    let_go.set()
    silent.close()


def test_intervals_of_ratios_by_hand(load):
    ratio_of_rounds = load("harness").ratio_of_rounds
    found = ratio_of_rounds([math.e, math.e**3], [1.0, 1.0])  # logarithms 1 and 3: t is 12.706, the standard error 1
    assert [math.log(each) for each in found] == pytest.approx([2.0, 2 - 12.7062, 2 + 12.7062], rel=1e-4)
    assert ratio_of_rounds([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.0, 2.0))
    there, back = ratio_of_rounds([3.0, 5.0, 4.0], [1.0, 2.0, 1.5]), ratio_of_rounds([1.0, 2.0, 1.5], [3.0, 5.0, 4.0])
    assert back == pytest.approx((1 / there.ratio, 1 / there.high, 1 / there.low))
    assert ratio_of_rounds([1.0], [2.0]) is None
    for over, under in (([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1.0])):
        refuses(ValueError, "positive, and equally many", ratio_of_rounds, over, under)


def test_rows_and_comparisons_have_intervals(load):
    harness = load("harness")
    rows = harness.measure({"a": iter([1.0, 2.0, 4.0, 3.0]).__next__, "b": iter([1.0, 1.0, 2.0, 1.6]).__next__}, runs=3)
    found = harness.ratio_of_rounds([2.0, 4.0, 3.0], [1.0, 2.0, 1.6])
    compared = harness.compare(rows, "", ["b"], ["a"], higher_is_better=False)
    assert compared["interval"] == pytest.approx([found.low, found.high], rel=1e-3)
    assert compared["interval"][0] < compared["ratio"] < compared["interval"][1]
    harness.add_ratios([*rows, {"name": "c", "missing": "not installed"}], "a", higher_is_better=False)
    assert (rows[1]["against"], rows[1]["interval"]) == ("a", compared["interval"])
    assert rows[1]["speedup"] == pytest.approx(found.ratio, rel=1e-3)
    assert "speedup" not in rows[0]


def test_tables_in_readme_and_docs_are_made_from_the_results(load):
    report = load("report")
    for path, text in report.pages(report.load()).items():
        assert path.read_text(encoding="utf-8") == text, "run python -m benchmarks.report"
    assert report.CHART.read_text(encoding="utf-8") == report.chart(report.load()), "run python -m benchmarks.report"
    assert report.SCALING_CHART.read_text(encoding="utf-8") == report.scaling()[1], "run python -m benchmarks.report"
    assert report.GAINS_CHART.read_text(encoding="utf-8") == report.hybrid_gains(), "run python -m benchmarks.report"


def test_the_first_screen_of_the_readme_has_measured_times(load):
    report = load("report")
    text = report.README.read_text(encoding="utf-8").partition("\n## ")[0]
    found = {each["what"]: (result["unit"], each) for result in report.load() for each in result["comparisons"]}
    times = (
        "Training epoch, SAGE, against PyG with trim_to_layer",
        "Full-graph epoch, GAT on Reddit, against PyG, edge_index",
    )
    for what in times:
        unit, comparison = found[what]
        for median in comparison["medians"]:
            seconds = median / 1000 if unit.startswith("ms") else median
            assert f"{seconds:.3g} s" in text, what
    steps = json.loads((report.RESULTS / "gpu_first.json").read_text())["parts"]["steps"]
    for name in ("persistent, bulk=8", "NeighborDataModule"):
        assert f"{steps[name]['median']:.3g} ms" in text


def test_table_has_a_line_per_comparison(load):
    report = load("report")
    machine = {"python": "3", "torch": "2", "torch_geometric": "2", "pyg_lib": "0", "torch_sparse": "not installed",
               "cores": 2, "cpu": "some", "os": "Linux"}  # fmt: skip
    compared = {"what": "Sampling", "ours": "ours", "peer": "pyg-lib", "medians": [30.0, 5.0], "ratio": 6.0}
    result = {"topic": "Trees", "title": "T", "unit": "M/s", "settings": {"runs": 5}, "machine": machine,
              "comparisons": [compared, {"what": "Other", "missing": "not installed"},
                              {**compared, "what": "Own", "peer": "ours, old"},
                              {**compared, "what": "Least", "peer": "bound"}]}  # fmt: skip
    content = report.table([result])
    assert "<b>Trees</b>: 2 against peers, 1 against limits, 1 ours against ours" in content
    order = ("**Against peers**", "| Sampling", "| Other", "**Against limits**", "| Least", "**Ours against ours**",
             "| Own", "</details>")  # fmt: skip
    assert sorted(order, key=content.index) == [*order]
    assert "| Sampling | 30 M/s (ours) | 5 M/s (pyg-lib) | **6x** |" in content
    assert "| Other | | not installed | |" in content
    sure = report.table([{**result, "comparisons": [{**compared, "interval": [5.4, 6.6]}]}])
    assert "| 5 M/s (pyg-lib) | **6x** (5.4 to 6.6) |" in sure
    harness = load("harness")
    text = f"before\n{harness.START}\nold\n{harness.END}\nafter"
    assert report.replaced(text, content) == f"before\n{harness.START}\n{content}\n{harness.END}\nafter"
    refuses(ValueError, "both lines", report.replaced, "no markers", content)
    short = report.headlines([{**result, "comparisons": [compared, {**compared, "what": "Third"}]}], ["Third"])
    assert [line.split(" |")[0] for line in short.splitlines()[2:3]] == ["| Third"]
    assert short.splitlines()[3:] == ["", f"- M{report._machine(result)[1:]}"]
    refuses(KeyError, "Fourth", report.headlines, [result], ["Fourth"])


def test_the_chart_has_a_mark_per_ratio(load):
    report = load("report")
    results = report.load()
    ratios = [each for result in results for each in result["comparisons"] if "ratio" in each]
    assert report.chart(results).count("<circle") == len(ratios)
    assert {result["topic"] for result in results} == {*report.TOPICS}
    bounds = [each for each in ratios if each["peer"] == "bound"]
    assert {report.kind(each) for each in bounds} == {"limits"}
    over = json.loads((report.RESULTS / "epoch.json").read_text())["roofline"]["SAGE"]["measured over bound"]
    assert bounds[0]["ratio"] == pytest.approx(1 / over, rel=0.01)


def test_a_known_line_is_fitted_and_predicted(load, monkeypatch, tmp_path):
    scaling, described = load("scaling"), load("harness").machine()

    def pretend(folder, edges, steps):
        graph, found = scaling.Graph(edges // 10, edges), {step: {} for step in steps}
        for cost in scaling.COSTS.values():
            value = cost.predict((7, 2, 3)[: len(cost.terms(graph))], graph)
            found[cost.step][cost.key] = value * (edges / 1e9 if cost.key == "wall, s" else 1)
        return found

    monkeypatch.setattr(scaling, "measure_steps", pretend)
    monkeypatch.setattr(scaling, "machine", lambda: {**described, "cores": 4})
    monkeypatch.setattr(scaling, "BILLION", tmp_path / "billion.json")
    steps = pretend(None, 10**9, scaling.STEPS)
    scaling.BILLION.write_text(json.dumps({"settings": {"edges": 10**9}, "extra": steps}))
    result = scaling.main(["--out", str(tmp_path / "scaling.json")])
    assert [*result["extra"]["steps"]] == [10**6, 10**7, 10**8, 10**9]
    fits, predicted = result["extra"]["fits"], result["extra"]["predicted"]["papers100M"]
    for name, found in fits.items():
        assert found["factors"] == pytest.approx([7, 2, 3][: len(found["factors"])]), name
        assert abs(found["error"]) < 1e-3, name
    papers = scaling.GRAPHS["papers100M"]
    sampled = 7 + 2 * math.log2((8 * papers.nodes + 4 * papers.edges) / 1e6)
    loaded = 4 * (7 + 2 * math.log2(512 * papers.nodes / 1e6))  # rows of 512 bytes instead of 128
    for place, cores in ((scaling.HERE, None), ("MorphGL, machine A", 12), ("NeutronAscend", 48)):
        costs, share = predicted[place], 1 / cores if cores else 1
        assert costs["sampling, one core"] == pytest.approx(sampled * share, rel=1e-3)
        assert costs["loading from memory"] == pytest.approx(loaded * (4 * share if cores else 1), rel=1e-3)
    assert "| +0 % |" in scaling.tables(result)


@pytest.mark.slow
def test_costs_are_measured_at_a_small_size(load, tmp_path):
    result = load("scaling").main(["--quick", "--folder", str(tmp_path)])
    assert all(value > 0 for found in result["extra"]["fits"].values() for value in found["measured"].values())


@pytest.mark.slow
def test_a_script_that_fails_says_why(load, tmp_path):
    scripts = load("scripts")
    with pytest.raises(RuntimeError, match=r"(?s)exit code 1.*KeyError: 'nodes'") as error:
        scripts.Script("benchmarks.hyscale.contestants", {}, tmp_path, "broken")
    assert "Traceback" in str(error.value)

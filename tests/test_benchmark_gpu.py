"""GPU benchmarks run under Triton's interpreter, where their times mean nothing, and without Hydra."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")
from benchmarks.gpu.baselines import MODES
from lightning_gnn.triton_kernels.sample import INTERPRETED

ROOT = Path(__file__).parent.parent
interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


@pytest.fixture
def load(monkeypatch):
    # The benchmarks are not installed; they are imported from the root of the repository.
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.mark.slow
@interpreted
def test_a_second_call_goes_on_where_the_first_one_ended(load, tmp_path, monkeypatch, capsys):
    everything, one_graph, persistent = load("gpu.everything"), load("gpu.one_graph"), load("gpu.persistent")

    def call(*options):
        return everything.main(["--interpret", "--runs", "1", "--minutes", "600", "--out", str(tmp_path), *options])

    call("--minutes", "0")  # too short for any part
    assert not list(tmp_path.iterdir())
    assert "left: check (about 0.4 minutes), layers" in (told := capsys.readouterr().out)
    assert 'to go on: make bench-gpu ARGS="--minutes 2"' in told

    call()
    index = json.loads((tmp_path / "gpu_first.json").read_text())
    assert all(entry["finished"] and "minutes" in entry for entry in index["measured"].values())
    measured = {*everything.ONE_GRAPH, *everything.REHEARSED, "aggregate_blocks", "persistent"}
    assert index["measured"].keys() == measured
    assert not index["parts"]["check"]["wrong"]
    assert set(index["parts"]["shards"]) == set(load("gpu.shards").PLACES)
    for part in {*everything.ONE_GRAPH} - {"check", "phases"}:
        failed = {name for name, figure in index["parts"][part].items() if "failed" in figure}
        apart = {"features dealt out", "both dealt out"} if part == "shards" else set()  # no peer access here
        assert failed == apart, part
        assert all(figure["median"] > 0 for name, figure in index["parts"][part].items() if name not in failed)
    text = (tmp_path / "gpu.md").read_text()
    assert text.index("## Verdicts") < text.index("## Roofline") < text.index("## Samples") < text.index("## Host")
    assert "the times mean nothing" in text
    assert "Fused or queue: **" in text
    assert "all is measured" in capsys.readouterr().out

    hybrid = json.loads((tmp_path / "gpu_hyscale.json").read_text())
    assert [row["name"] for row in hybrid["rows"]] == [*hybrid["variants"]]
    assert all(row["median"] > 0 for row in hybrid["rows"])
    trainers = {name: len(own["shares"]) for name, own in hybrid["variants"].items() if "shares" in own}
    rule = hybrid["rule"]
    assert [*trainers.values()] == [1, 2 - ("no CPU trainer" in rule["says"]), 2]
    assert rule["with the CPU"] > 0 < rule["without"]
    assert all(hybrid["variants"][name]["predicted_ms"] > 0 for name in trainers)
    assert f"the rule: {rule['says'].removeprefix('hyscale: ')}" in text

    cells = json.loads((tmp_path / "gpu_persistent.json").read_text())
    assert not cells["times_mean_something"]
    assert not cells["skipped"]
    for cell in cells["cells"]:
        assert not cell["failed"]
        assert set(cell["whole_us"]) == {*MODES, persistent.CPU}
        assert set(cell["kernel_us"]) == set(MODES)
    assert {"discover_kernel", "queue_kernel", "emit_kernel"} == set(cells["cells"][0]["split"]["no_queue_kernel_us"])

    with monkeypatch.context() as patch:  # all is there
        patch.setattr(everything.Everything, "measure", None)
        call()
    assert "measured before, so skipped: check, layers" in capsys.readouterr().out

    last = cells["cells"].pop()  # as if the time had been up before the last cell
    (tmp_path / "gpu_persistent.json").write_text(json.dumps(cells))
    index["measured"]["persistent"]["finished"] = False
    (tmp_path / "gpu_first.json").write_text(json.dumps(index))
    call()
    again = json.loads((tmp_path / "gpu_persistent.json").read_text())["cells"]
    assert again[:-1] == cells["cells"]
    assert [again[-1][key] for key in ("hops", "fanout", "batch_size")] == [
        last[key] for key in ("hops", "fanout", "batch_size")
    ]

    right = one_graph.OneGraph.sample

    def wrong(graph, sampler, turn):
        out = right(graph, sampler, turn)
        return (out[0].flip(0), *out[1:]) if sampler.mode == "fused" and turn == 1 else out

    with monkeypatch.context() as patch:
        patch.setattr(one_graph.OneGraph, "sample", wrong)
        with pytest.raises(SystemExit, match=r"samples differ.*fused: WRONG SAMPLE: node of mini-batch 1 differs"):
            call("--only", "check", "--fresh")
    assert "differs from the CPU's**: no figure below counts." in (tmp_path / "gpu.md").read_text()
    call("--only", "check")  # a check that failed is repeated
    assert not json.loads((tmp_path / "gpu_first.json").read_text())["parts"]["check"]["wrong"]


def check_profile(folder, load):
    figures = json.loads((folder / "gpu_first.json").read_text())["parts"]["profile"]
    assert set(figures) == {"a step", "a step under the profiler", "the device is busy", "launches"}
    assert all(figure["median"] > 0 for figure in figures.values())


def check_phases(folder, load):
    figures = json.loads((folder / "gpu_first.json").read_text())["parts"]["phases"]
    hops = [f"hop {hop}: {what}" for hop in (1, 2) for what in ("{}", "number")]
    fused = ["seeds: place", "seeds: number", *(name.format("pick and bid") for name in hops)]
    queue = ["discover", "find the samples", *fused[:2], *(name.format("read and bid") for name in hops)]
    kinds = {"fused": fused, "bulk of 2": [*fused, "split"], "queue": queue}
    assert [*figures] == [f"{kind}, {name}" for kind, names in kinds.items() for name in names]
    assert sum(figure["median"] for figure in figures.values()) > 0


def check_full_graph(folder, load):
    epochs, found = load("full_graph.epochs"), json.loads((folder / "gpu_full_graph.json").read_text())
    libraries = [(model, library) for model, peers in epochs.CUSPARSE.items() for library in ("ours", *peers)]
    names = {f"{library}, {model}, Products, dropout {p:g}" for model, library in libraries for p in epochs.DROPOUTS}
    assert {row["name"] for row in found["rows"]} == names
    assert all(row["median"] > 0 for row in found["rows"])
    assert len(found["comparisons"]) == 4
    assert {one["sum"] for one in found["sums"]} == {"plain", "weighted"}
    assert max(one["apart"] for one in found["sums"]) < 1e-4


def check_collective(folder, load):
    (cell,) = json.loads((folder / "gpu_collective.json").read_text())["cells"]
    assert [*cell["mini-batches per s"]] == [*load("collective.gpu").PREDICTED]
    assert all(rate > 0 for rates in cell["mini-batches per s"].values() for rate in rates.values())
    assert f"Mini-batches per second with {cell['cores']} cores, and predicted" in (folder / "gpu.md").read_text()


@pytest.mark.medium
@interpreted
@pytest.mark.parametrize("check", [check_profile, check_phases, check_full_graph, check_collective])
def test_a_part_is_measured_in_this_process_and_then_skipped(check, load, tmp_path, monkeypatch, capsys):
    everything, part = load("gpu.everything"), check.__name__.removeprefix("check_")
    options = ["--interpret", "--runs", "1", "--minutes", "60", "--out", str(tmp_path), "--only", part]
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", None)
    everything.main(options)
    check(tmp_path, load)
    monkeypatch.setattr(everything.Everything, "measure", None)
    everything.main(options)
    assert f"measured before, so skipped: {part}" in capsys.readouterr().out


@pytest.mark.medium
def test_contestants_of_a_cpus_benchmark_run_in_threads(load, monkeypatch):
    everything, aggregate = load("gpu.everything"), load("ops.aggregate")
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", None)
    with everything.in_threads(aggregate):
        rows = aggregate.main(["--quick", "--runs", "1", "--nodes", "50", "--edges", "200", "--only", "ours"])["rows"]
    assert len(rows) == 1 + 2 * len(aggregate.WIDTHS)
    assert all(row["median"] > 0 for row in rows)


@pytest.mark.medium
@interpreted
@pytest.mark.parametrize("mode", ["fused", "persistent"])
def test_launches_that_end_early_leave_later_samples_right(mode, load):
    one_graph, phases = load("gpu.one_graph"), load("gpu.phases")
    graph = one_graph.OneGraph(torch.device("cpu"), **load("gpu.everything").TINY)
    sampler = graph.sampler(graph.host, mode=mode)

    def sample(turn):
        for end in range(1, 8, 3):
            phases.until(graph, sampler.batch(graph.seeds_there[turn], graph.fanouts, turn), end)
        return graph.sample(sampler, turn)

    assert not graph.compare({mode: sample}, 2)[0]


@pytest.mark.slow
def test_the_script_for_a_machine_with_a_gpu_rehearses_without_one(tmp_path):
    environment = {**os.environ, "REHEARSE": "1", "MINUTES": "0", "OUT": str(tmp_path), "PYTHON": sys.executable}
    environment |= {"PIP": "false"}  # the package is installed

    def run(**changes):
        command = [str(ROOT / "tools" / "gpu_machine.sh"), "--only", "hyscale,phases"]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment | changes)

    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left: hyscale (about 1.9 minutes), phases" in done.stdout
    assert "skipped" in (tmp_path / "tests.log").read_text()
    failed = run(PYTHON="false")
    assert failed.returncode == 1
    assert "false failed; set PIP" in failed.stdout


@pytest.mark.slow
def test_it_needs_no_hydra():
    code = "import sys; sys.modules['hydra'] = sys.modules['omegaconf'] = None; "
    code += "import benchmarks.gpu.everything as all, benchmarks.gpu.shards, benchmarks.gpu.aggregate_blocks; "
    code += "[all.import_module(f'benchmarks.{name}') for name in all.SCRIPTS.values() if name != 'gpu.host']"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_says_so_in_one_line(load, capsys):
    assert not load("gpu.everything").main([])
    assert capsys.readouterr().out.count("\n") == 1

"""The benchmark of the GPU sampler runs, under Triton's interpreter, and says that its times mean nothing then."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")
from benchmarks.sampling_baselines import MODES
from lightning_gnn.triton_kernels.hops import PHASES
from lightning_gnn.triton_kernels.sample import INTERPRETED

ROOT = Path(__file__).parent.parent
interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


@pytest.fixture
def load(monkeypatch):
    # The benchmarks are no part of the installed package: they are found from the top of the repository.
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.mark.slow
@interpreted
def test_describes_what_it_measured(load, tmp_path, capsys):
    out = tmp_path / "gpu_persistent.json"
    load("persistent").main(["--interpret", "--runs", "1", "--out", str(out)])
    text = out.read_text()
    result = json.loads(text)
    assert not result["times_mean_something"]
    assert not result["skipped"]
    assert len(result["cells"]) == 2
    for cell in result["cells"]:
        assert not cell["failed"]
        assert set(cell["whole_us"]) == {*MODES, "CPU and transfer"}
        assert set(cell["kernel_us"]) == set(MODES)
        assert all(len(seen["values"]) == 1 for seen in cell["whole_us"].values())
        assert all(seen["share_of_ceiling"] > 0 for seen in cell["kernel_us"].values())
    split = result["cells"][0]["split"]
    assert [hop["workload"] for hop in split["hop_by_hop"]][:2] == [0, 4]
    assert len(load("persistent_cells").PHASES) == PHASES.value
    assert {"discover_kernel", "queue_kernel", "emit_kernel"} == set(split["no_queue_kernel_us"])
    assert {"gather", "topology", "caches"} <= set(result["places"])
    assert "failed" not in json.dumps([result["places"]["gather"], result["places"]["topology"]])
    targets = [comparison["target"] for comparison in result["comparisons"]]
    assert {2.3, 100, 0.95} <= set(targets)
    assert all(comparison["ratio"] > 0 for comparison in result["comparisons"])
    for path in (str(ROOT), str(tmp_path), sys.prefix):
        assert path not in text
    assert "hop_by_hop" in capsys.readouterr().out


@pytest.mark.slow
@interpreted
def test_a_wrong_sample_loses_nothing_and_ends_in_an_error(load, tmp_path, monkeypatch):
    persistent, right = load("persistent"), load("persistent_cells").Bench.sample

    def wrong(bench, mode, cell, turn):
        out = right(bench, mode, cell, turn)
        if mode == "fused" and turn == 1:
            return out[0].flip(0), *out[1:]
        if mode == "no_queue" and cell[2] == 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return out

    monkeypatch.setattr(load("persistent_cells").Bench, "sample", wrong)
    out = tmp_path / "gpu_persistent.json"
    with pytest.raises(SystemExit, match="samples differ"):
        persistent.main(["--interpret", "--modes", "fused,no_queue,hop_by_hop", "--runs", "1", "--out", str(out)])
    first, second = json.loads(out.read_text())["cells"]
    assert first["failed"] == {"fused": "WRONG SAMPLE: node of mini-batch 1 differs from the CPU's"}
    assert "no_queue" in first["whole_us"]
    assert second["failed"]["no_queue"] == "OutOfMemoryError: CUDA out of memory"
    assert "hop_by_hop" in second["kernel_us"]


def test_full_grid_is_that_of_the_paper(load):
    args = load("persistent").options([])
    assert len(args.graphs) * len(args.cells) == 6 * 2 * 3 * 4
    assert args.cells[0] == (3, 10, 2048)
    assert len(load("persistent").options(["--quick"]).cells) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_says_so_in_one_line(load, tmp_path, capsys):
    assert load("persistent").main(["--out", str(tmp_path / "x.json")]) == {}
    assert "no CUDA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_rounds_go_on_without_a_contestant_that_fails(load):
    device_clock, calls = load("device_clock"), []

    def contestant(name, us):
        def call(turn):
            calls.append(name)
            if name == "b" and turn == 1:
                raise MemoryError("no more")
            return us

        return call

    seen = device_clock.rounds(
        {"a": contestant("a", 1.0), "b": contestant("b", 1.0), "slow": contestant("slow", 2e6)}, 4, {"a": 2, "slow": 2}
    )
    assert calls == ["a", "b", "slow", "a", "b", "slow", "a", "a"]
    assert seen == {"a": [1.0] * 4, "b": "MemoryError: no more", "slow": [2e6] * 2}

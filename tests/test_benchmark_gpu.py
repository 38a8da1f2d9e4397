"""GPU benchmarks run under Triton's interpreter, where their times mean nothing, and without Hydra."""

from __future__ import annotations

import importlib
import json
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
    assert "left: check (about 2 minutes), samples" in (told := capsys.readouterr().out)
    assert 'to go on: make bench-gpu ARGS="--minutes 3"' in told

    call()
    index = json.loads((tmp_path / "gpu_first.json").read_text())
    assert all(entry["finished"] and entry["minutes"] > 0 for entry in index["measured"].values())
    measured = {*everything.ONE_GRAPH, "aggregate_blocks", "persistent"}
    assert index["measured"].keys() == measured
    assert not index["parts"]["check"]["wrong"]
    assert set(index["parts"]["shards"]) == set(load("gpu.shards").PLACES)
    for part in everything.ONE_GRAPH.keys() - {"check"}:
        failed = {name for name, figure in index["parts"][part].items() if "failed" in figure}
        apart = {"features dealt out", "both dealt out"} if part == "shards" else set()  # no peer access here
        assert failed == apart, part
        assert all(figure["median"] > 0 for name, figure in index["parts"][part].items() if name not in failed)
    text = (tmp_path / "gpu.md").read_text()
    assert text.index("## Verdicts") < text.index("## Roofline") < text.index("## Samples") < text.index("## Host")
    assert "the times mean nothing" in text
    assert "Fused or queue: **" in text
    assert "all is measured" in capsys.readouterr().out

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
    assert "measured before, so skipped: check, samples" in capsys.readouterr().out

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

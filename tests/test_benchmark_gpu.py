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
def test_the_first_page_about_a_gpu_is_filled(load):
    gpu_first, contestants = load("gpu.first"), load("gpu.contestants")
    contestants.BULKS = (2,)
    first = contestants.First(
        torch.device("cpu"), nodes=80, edges=400, features=3, fanouts=(2, 1), batch_size=4, batches=2, runs=1, warm=1,
        small={"num_programs": 1, "num_warps": 1},
    )  # fmt: skip
    seen = []
    found = gpu_first.run(first, lambda parts: seen.append(set(parts)), ranks=2, options={"bulk": 1, "prefetch": 0})
    assert found["wrong"] is None
    assert len(seen) == 5
    assert set(found["shards"]) == set(load("gpu.shards").PLACES)
    for part in gpu_first.PARTS:
        failed = {name: figure["failed"] for name, figure in found[part].items() if "failed" in figure}
        apart = {"features dealt out", "both dealt out"} if part == "shards" else set()  # no peer access here
        assert set(failed) == apart, part
        assert all(figure["median"] > 0 for name, figure in found[part].items() if name not in failed)
    machine = {"torch": "2", "torch_geometric": "2", "date": "today"}
    text = load("gpu.page").page(machine, "", load("gpu.model").Batch((4, 8), (8,)), found, ["GraphBolt"])
    assert text.index("## Verdicts") < text.index("## Roofline") < text.index("## Samples") < text.index("## Host")
    assert "the times mean nothing" in text
    assert "Fused or queue: **" in text
    assert load("gpu.page").verdicts({"wrong": "WRONG SAMPLE"}) == ["**WRONG SAMPLE**: no figure below counts."]


@pytest.mark.slow
@interpreted
def test_all_ways_of_sampling_on_a_gpu_are_measured(load, tmp_path, monkeypatch):
    persistent, cells = load("gpu.persistent"), load("gpu.persistent_cells")
    out = tmp_path / "gpu_persistent.json"
    persistent.main(["--interpret", "--runs", "1", "--out", str(out)])
    result = json.loads(out.read_text())
    assert not result["times_mean_something"]
    assert not result["skipped"]
    assert len(result["cells"]) == 2
    for cell in result["cells"]:
        assert not cell["failed"]
        assert set(cell["whole_us"]) == {*MODES, "CPU and transfer"}
        assert set(cell["kernel_us"]) == set(MODES)
    assert {"discover_kernel", "queue_kernel", "emit_kernel"} == set(result["cells"][0]["split"]["no_queue_kernel_us"])
    assert {row["mode"] for row in result["launches"]} == {"fused", "persistent"}
    assert all(us > 0 for row in result["launches"] for us in row["us"].values())
    assert result["caches"]
    assert "failed" not in json.dumps(result["caches"])

    right = cells.Bench.sample

    def wrong(bench, mode, cell, turn):
        out = right(bench, mode, cell, turn)
        return (out[0].flip(0), *out[1:]) if mode == "fused" and turn == 1 else out

    monkeypatch.setattr(cells.Bench, "sample", wrong)
    with pytest.raises(SystemExit, match="samples differ"):
        persistent.main(["--interpret", "--modes", "fused,hop_by_hop", "--runs", "1", "--out", str(out)])
    failed = json.loads(out.read_text())["cells"][0]["failed"]
    assert failed == {"fused": "WRONG SAMPLE: node of mini-batch 1 differs from the CPU's"}


@pytest.mark.slow
def test_it_needs_no_hydra():
    code = "import sys; sys.modules['hydra'] = sys.modules['omegaconf'] = None; import benchmarks.gpu.everything, "
    code += "benchmarks.gpu.first, benchmarks.gpu.page, benchmarks.gpu.persistent, benchmarks.sampling.minibatch, "
    code += "benchmarks.models.epoch, benchmarks.ops.aggregate, benchmarks.full_graph.epochs, "
    code += "benchmarks.hyscale.epochs, benchmarks.collective.epochs"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
@pytest.mark.parametrize("name", ["gpu.everything", "gpu.persistent"])
def test_without_a_gpu_says_so_in_one_line(name, load, capsys):
    assert not load(name).main([])
    assert capsys.readouterr().out.count("\n") == 1

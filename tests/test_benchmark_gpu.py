"""The page about a GPU is written from made-up figures, and what fills it runs under Triton's interpreter."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")
from lightning_gnn.triton_kernels.sample import INTERPRETED

ROOT = Path(__file__).parent.parent
MACHINE = {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.13", "torch_geometric": "2.8", "date": "2026-11-24"}


@pytest.fixture
def load(monkeypatch):
    # The benchmarks are no part of the installed package: they are found from the top of the repository.
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def figures(**medians):
    return {
        name: {"failed": seen} if isinstance(seen, str) else {"values": [seen, seen + 1], "median": seen}
        for name, seen in medians.items()
    }


def cells():
    return {
        "wrong": None,
        "samples": figures(**{
            "fused": 100.0, "bulk of 2": 70.0, "bulk of 4": 51.0, "bulk of 8": 50.0, "queue, fetch 32": 150.0,
            "queue, fetch 128": 120.0, "hop by hop, with the host": 200.0,
            "CPU and transfer": "OutOfMemoryError: CUDA out of memory",
        }),
        "places": figures(**{
            "edges in pinned memory, bulk of 8": 900.0, "edges read by the CPU": 450.0,
            "features in pinned memory": 1000.0, "features read by the CPU": 3000.0,
        }),
        "loaders": figures(**{"persistent, bulk=8": 1.0, "NeighborDataModule with PrefetchLoader": 4.0,
                              "PyG with PrefetchLoader": 8.0, "cuGraph-PyG": 2.0}),
        "shards": figures(**{"both dealt out": 2.0, "all pinned": 9.0, "all on each GPU": "OutOfMemoryError: all"}),
    }  # fmt: skip


def test_the_page_says_what_the_figures_decide(load):
    page, batch = load("gpu_page"), load("gpu_model").Batch((1024, 9000, 60_000), (15_000, 90_000))
    assert page.verdicts(cells()) == [
        'Fused or queue: **fused**; "queue, fetch 128" takes 1.20 times as long as fused.',
        "Bulk size: **4**; the smallest within 3% of the fastest.",
        "Against hop by hop with a wait per hop: **4.00 times** as fast.",
        "Host memory, edges: better read by **the CPU** (the CPU takes 0.50 times as long).",
        "Host memory, features: better read by **the GPU** (the CPU takes 3.00 times as long).",
        "Several GPUs, time of a mini-batch over that with **both dealt out**: all pinned 4.50.",
        'Mini-batches: "persistent, bulk=8" is **2.00 times** as fast as the best peer, "cuGraph-PyG".',
    ]
    text = page.page(MACHINE, "A graph.", batch, cells(), ["GraphBolt"])
    assert text.index("## Verdicts") < text.index("## Roofline") < text.index("## Samples") < text.index("## Host")
    assert "For H100 SXM, 3,350 GB/s" in text
    assert "| bulk of 8 |" in text
    assert "| CPU and transfer | OutOfMemoryError: CUDA out of memory | | |" in text
    assert "## Training steps" not in text
    assert "Not importable here, so not measured: GraphBolt." in text
    assert len(text.splitlines()) < 80


def test_a_page_without_figures_or_with_wrong_samples(load):
    page, batch = load("gpu_page"), load("gpu_model").Batch((4, 9), (15,))
    assert "| fused |" in page.page(MACHINE, "", batch, {}, [])
    unknown = page.page({**MACHINE, "gpu": "Some GPU"}, "", batch, {"samples": {}}, [])
    assert "No bandwidth of Some GPU is known" in unknown
    wrong = page.verdicts({"wrong": "WRONG SAMPLE: mini-batch 0 of a bulk differs from the CPU's", **cells()} | {})
    assert wrong[0].startswith("Fused")  # cells() says that nothing is wrong
    assert page.verdicts({"wrong": "WRONG SAMPLE"}) == ["**WRONG SAMPLE**: no figure below counts."]


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
def test_what_fills_the_page_runs(load):
    gpu_first = load("gpu_first")
    gpu_first.BULKS = (2,)
    first = gpu_first.First(
        torch.device("cpu"), nodes=80, edges=400, features=3, fanouts=(2, 1), batch_size=4, batches=2, runs=1, warm=1,
        small={"num_programs": 1, "num_warps": 1},
    )  # fmt: skip
    seen = []
    found = gpu_first.run(first, lambda parts: seen.append(set(parts)), ranks=2, options={"bulk": 1, "prefetch": 0})
    assert found["wrong"] is None
    assert len(seen) == 5
    assert set(found["shards"]) == set(load("gpu_shards").PLACES)
    for part in gpu_first.PARTS:
        failed = {name: figure["failed"] for name, figure in found[part].items() if "failed" in figure}
        apart = {"features dealt out", "both dealt out"} if part == "shards" else set()  # no peer access here
        assert set(failed) == apart, part
        assert all(figure["median"] > 0 for name, figure in found[part].items() if name not in failed)
    text = load("gpu_page").page(
        {"torch": "2", "torch_geometric": "2", "date": "today"}, "", load("gpu_model").Batch((4, 8), (8,)), found, []
    )
    assert "the times mean nothing" in text


@pytest.mark.slow
def test_it_needs_no_hydra():
    code = "import sys; sys.modules['hydra'] = sys.modules['omegaconf'] = None; import benchmarks.gpu, "
    code += "benchmarks.gpu_first, benchmarks.gpu_page; from lightning_gnn import PersistentSamplerDataModule"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

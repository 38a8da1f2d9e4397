"""The NPU binding: its requirements, and its results when built against stubs of CANN and torch_npu."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_gnn.ascend_ops import binding
from lightning_gnn.ops.aggregate import backends as aggregate_backends
from lightning_gnn.ops.aggregate import npu as aggregate_npu

HERE = Path(__file__).parent
STUBS = HERE / "stubs"

needs_tools = pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("g++")), reason="building the binding needs cmake and g++"
)


@pytest.fixture
def stand_ins(tmp_path):
    """Return an environment in which CANN and torch_npu appear to be installed."""
    shutil.copytree(STUBS, tmp_path / "stubs")
    (tmp_path / "stubs/cann/ccec_compiler/bin/bisheng").chmod(0o755)
    folder = tmp_path / "stubs/site/torch_npu/lib"
    folder.mkdir()
    command = ["g++", "-shared", "-x", "c++", "/dev/null", "-o", str(folder / "libtorch_npu.so")]
    subprocess.run(command, check=True)
    return {
        "ASCEND_HOME_PATH": str(tmp_path / "stubs/cann"),
        "SOC_VERSION": "Ascend910B3",
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "stubs/site"), os.environ.get("PYTHONPATH", "")]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


@pytest.mark.slow
@needs_tools
def test_binding_equals_the_twins_backend(stand_ins, tmp_path):
    """The binding's C++ is compiled and linked as for an NPU, its schemas checked by torch, its launches simulated."""
    # The twin's own libraries come from the usual cache; the binding is rebuilt.
    env = {**os.environ, **stand_ins}
    command = [sys.executable, "-c", _REDIRECTED, str(tmp_path / "cache"), str(HERE / "host_on_twin.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["differences"] == [], done.stderr[-4000:]
    assert found["kernels"] == [
        "aggregate_cube",
        "aggregate_max",
        "aggregate_max_backward",
        "aggregate_update",
        "aggregate_vector",
        "combine_parts",
        "edge_products",
        "edge_softmax",
        "edge_softmax_backward",
        "edge_sum",
        "gather_rows",
        "update",
    ]
    assert found["library"].startswith(str(tmp_path / "cache"))
    assert found["said"][0].startswith("building the Ascend C kernels for Ascend910B3 into")
    assert found["said"][1] == ""
    assert found["empty"]
    assert found["streams"] == []
    refusals = found["refusals"]
    assert "requires weights [E, 2] for x [3, 2, 5], but weight is None; without weights, pass x" in refusals[0]
    assert refusals[1] == "NotImplementedError: the NPU has no kernel for reduce=max"
    assert refusals[2].startswith("ValueError: chunk ranges must follow each other from 0 to 0")
    assert refusals[3] == "ValueError: unknown kernel scatter_rows"
    assert refusals[4] == "ValueError: update takes 4 inputs and 1 outputs, but got 1 and 1"
    assert len(found["warnings"]) == 1  # three of the cases are converted


_REDIRECTED = """
import pathlib, runpy, sys
cache, script = sys.argv[1:]
from lightning_gnn.ascend_ops import binding
from lightning_gnn.runtime.store import get_or_create

def keep(kind, key, make, title):
    return get_or_create(kind, key, make, lambda folder: folder, title=title, given=cache)

binding.kept_folder = keep
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.medium
@needs_tools
def test_compiler_output_is_in_the_error(stand_ins, tmp_path, monkeypatch, capsys):
    for name in ("ASCEND_HOME_PATH", "SOC_VERSION"):
        monkeypatch.setenv(name, stand_ins[name])
    monkeypatch.syspath_prepend(str(tmp_path / "stubs/site"))
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path / "cache"))
    cmake = next((tmp_path / "stubs/cann").rglob("ascendc.cmake"))
    cmake.write_text('message(FATAL_ERROR "this chip is too new")')
    with pytest.raises(
        binding.BindingError, match=r"(?s)cmake -S failed with status 1.*build\.log.*this chip is too new"
    ):
        binding.build()
    assert capsys.readouterr().err.startswith("building the Ascend C kernels for Ascend910B3")


def hide_packages(monkeypatch):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("SOC_VERSION", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(binding, "_loaded", None)


def test_everything_missing_is_named(monkeypatch):
    hide_packages(monkeypatch)
    with pytest.raises(binding.BindingError) as caught:
        binding.load()
    message = str(caught.value)
    for part in (
        "torch_npu (pip install 'lightning-gnn[npu]'",
        "ASCEND_HOME_PATH is not set",
        "source its set_env.sh",
        "cmake 3.18 or newer",
        "a C++ compiler (apt install g++",
        "an Atlas A2 or A3 chip (no NPU was found",
    ):
        assert part in message


def test_a_toolkit_that_is_gone_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "gone"))
    assert any("is not a folder" in problem for problem in binding.missing())


@pytest.mark.parametrize(
    ("chip", "fits"),
    [
        ("Ascend910B1", True),
        ("Ascend910B4-1", True),
        ("Ascend910_9391", True),
        ("Ascend910B", False),  # the first generation has the unified core
        ("Ascend910A", False),
        ("Ascend310P3", False),
    ],
)
def test_chip(monkeypatch, chip, fits):
    monkeypatch.setenv("SOC_VERSION", chip)
    assert any("Atlas A2" in problem for problem in binding.missing()) != fits
    assert fits or any(f"this is {chip}" in problem for problem in binding.missing())


def test_an_npu_without_the_kernels_uses_torch_and_says_why_once(monkeypatch):
    hide_packages(monkeypatch)
    npu = SimpleNamespace(type="npu", index=0)  # torch knows this device name only with torch_npu
    aggregate_npu.available.cache_clear()
    aggregate_npu.num_cores.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"(?s)without torch_npu.*CANN.*torch's own operators") as caught:
            functions = [aggregate_backends.functions_of(aggregate_backends.DEVICE, npu) for _ in range(2)]
        assert len(caught) == 1
        assert aggregate_npu.num_cores(0) == torch.get_num_threads()
        assert functions[1] is aggregate_backends.reference
    finally:
        aggregate_npu.available.cache_clear()
        aggregate_npu.num_cores.cache_clear()

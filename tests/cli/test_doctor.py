"""``lgnn doctor`` lists the installed packages and devices, and reports broken packages as broken."""

import shutil
import sys

import pytest
import torch

from lightning_gnn.cli.commands import doctor
from lightning_gnn.ops.aggregate import ascend_twin
from lightning_gnn.ops.aggregate.ascend_twin import record_launches
from tests.cli.command import run_exactly


def index_by_name(findings):
    return {finding.name: finding for finding in findings}


TOOLS = "torch,CUDA,Triton,CANN,torch_npu,pyg-lib,Ascend C kernels,g++,cmake,PyG,numba"
FUSED = "GCNConv,SAGEConv,GINConv,HeteroGraphSAGE,RGCN,RGAT,HGT,all others"


def test_it_finds_what_every_use_needs_and_says_which_layers_are_fused(capsys):
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    for name in (*TOOLS.split(","), *FUSED.split(","), torch.__version__):
        assert name in printed


def test_cann_is_looked_for_where_its_script_says(monkeypatch, tmp_path):
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert index_by_name(doctor.examine())["CANN"].state == "missing"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "nowhere"))
    assert index_by_name(doctor.examine())["CANN"].state == "broken"
    folder = tmp_path / "aarch64-linux"
    folder.mkdir()
    (folder / "ascend_toolkit_install.info").write_text("package_name=x\nversion=8.9.X\narch=aarch64\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    finding = index_by_name(doctor.examine())["CANN"]
    assert finding.state == "present"
    assert finding.detail.startswith("8.9.X")


def test_a_torch_npu_that_cannot_be_imported_is_broken_and_does_no_harm(monkeypatch, tmp_path):
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = index_by_name(doctor.examine())["torch_npu"]
    assert finding.state == "broken"
    assert "libhccl.so" in finding.detail
    assert "torch_npu" not in sys.modules


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin needs g++")


@needs_compiler
def test_the_kernels_are_compared_with_torch(capsys):
    with record_launches() as launches:
        assert doctor.main(["--kernels"]) == 0
    names = {launch.kernel for launch in launches}
    assert names >= {"edge_softmax", "edge_softmax_backward", "edge_products", "aggregate_update", "gather_rows"}
    assert names & {"aggregate_cube", "aggregate_vector"}
    assert names >= {"aggregate_max", "aggregate_max_backward"}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 15  # short enough for a bug report
    assert max(map(len, lines)) < 140
    assert lines[0].startswith("lightning-gnn ")
    assert lines[-1] == "all 5 are right"


@needs_compiler
def test_a_wrong_and_a_broken_kernel_are_named(monkeypatch, capsys):
    launch = ascend_twin.launch

    def broken(kernel, blocks, inputs, outputs, tiling):
        if kernel == "gather_rows":
            raise RuntimeError("aclrtlaunch failed\nwith a long story")
        launch(kernel, blocks, inputs, outputs, tiling)
        outputs[0].mul_(1.01)

    monkeypatch.setattr(ascend_twin, "launch", broken)
    assert doctor.main(["--kernels"]) == 1
    report = capsys.readouterr().out.splitlines()
    assert "aggregate (max): WRONG, error " in report[3]
    assert "aggregate_update: WRONG, error " in report[5]
    assert report[6] == "  gather_rows: failed: RuntimeError: aclrtlaunch failed"
    assert report[-1] == "3 of 5 are wrong: aggregate (max), aggregate_update, gather_rows"


def test_it_is_a_command_of_lgnn(capsys):
    assert not run_exactly("doctor")[0]
    assert "torch" in capsys.readouterr().out

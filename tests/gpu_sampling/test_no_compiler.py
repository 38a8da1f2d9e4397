"""Without a C compiler, torch and the CPU sampler replace the GPU kernels, and a warning gives the reason."""

import shutil
import sysconfig
import warnings

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from lightning_gnn import NeighborDataModule, PersistentNeighborSampler, PersistentSamplerDataModule
from lightning_gnn.ops import library
from lightning_gnn.ops.aggregate import reference
from lightning_gnn.ops.aggregate.backends import DEVICE, functions_of
from lightning_gnn.runtime import store
from lightning_gnn.sampling import NeighborSampler
from tests.batch_checks import assert_same_batches
from tests.gpu_sampling.test_datamodule import SIZES, data
from tests.gpu_sampling.test_sampler import assert_same_samples

GPU = torch.device("cuda")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture
def probe(monkeypatch, tmp_path):
    """Make the probe run as on a machine with a GPU and an empty cache of Triton."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(store, "_said", set())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(library, "triton_obstacle", library.triton_obstacle.__wrapped__)
    return monkeypatch


def test_no_compiler_is_found_out(probe):
    probe.setenv("PATH", "")
    assert "Failed to find C compiler" in library.triton_obstacle()
    probe.setenv("CC", "/nowhere/cc")
    assert "No such file or directory: '/nowhere/cc'" in library.triton_obstacle()
    with pytest.warns(UserWarning, match="No Triton kernels .* apt install gcc python3-dev"):
        assert not library.runs_triton(GPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not library.runs_triton(GPU)


@needs_gcc
def test_no_header_of_python_is_found_out(probe, tmp_path, capfd):
    probe.setattr(sysconfig, "get_paths", lambda **scheme: {"include": str(tmp_path)})
    assert "gcc" in library.triton_obstacle()
    assert "Python.h" in capfd.readouterr().err


@needs_gcc
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_with_both_only_the_driver_is_missing(probe):
    assert "active drivers" in library.triton_obstacle() or "libcuda" in library.triton_obstacle()


def test_torch_and_the_cpu_take_over(probe):
    probe.setattr(library, "triton_obstacle", lambda: "no compiler")
    with pytest.warns(UserWarning, match="No Triton kernels on the GPU"):
        assert functions_of(DEVICE, GPU) is reference
    with pytest.warns(UserWarning, match="No GPU for the persistent sampler"):
        ours = PersistentNeighborSampler(data(), [4, 2], seed=1, device="cuda")
    assert_same_samples(ours, NeighborSampler(data(), [4, 2], seed=1), torch.arange(9), 3)
    with pytest.warns(UserWarning, match="No GPU for the persistent sampler"):
        batches = list(PersistentSamplerDataModule(data(), **SIZES, device="cuda").train_dataloader())
    assert_same_batches(batches, NeighborDataModule(data(), **SIZES).train_dataloader())

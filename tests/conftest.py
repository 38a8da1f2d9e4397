"""Small machines run the tests several at a time: one torch thread each, and no talk from Lightning."""

import logging
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported, which Lightning and PyG do

import pytest
from hypothesis import HealthCheck, settings

from tests.patience import Watch

torch.set_num_threads(1)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
# Compiling on first use makes first examples slow; a fixed seed makes a failure in CI a failure everywhere.
settings.register_profile(
    "project", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("project")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """End a test that hangs."""
    if item.config.getoption("usepdb", False):
        return (yield)
    capture = item.config.pluginmanager.getplugin("capturemanager")
    with Watch(lambda: capture and capture.suspend_global_capture(in_=True)):
        return (yield)

"""Settings for parallel runs on small machines: one torch thread per process, no output from Lightning."""

import gc
import logging
import os
import random
import signal
from pathlib import Path
from zlib import crc32

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the other check keeps forked ranks from using the GPU

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it on import, which Lightning and PyG trigger

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from tests.campaigns import SLICES, fewer_examples, is_of_slice, place_cases, slice_of_commit
from tests.one_lightning import use_one_package
from tests.patience import Watch

PROGRAM_FOLDERS = ("cli", "callbacks", "faults")
"""Folders whose tests run whole programs, which makes all of them medium."""
HANDLERS = pytest.StashKey[dict]()
use_one_package()
torch.set_num_threads(1)
for name in ("pytorch_lightning", "lightning.pytorch"):
    logging.getLogger(name).setLevel(logging.ERROR)
# Compilation on first use makes first examples slow; a fixed seed makes failures in CI reproducible.
settings.register_profile(
    "project", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("quarter", settings.get_profile("project"), max_examples=25)  # of `make test`
settings.register_profile("small", settings.get_profile("project"), max_examples=10)  # of `make check`
settings.load_profile("project")


def pytest_addoption(parser):
    parser.addoption(
        "--slice",
        choices=[*map(str, range(SLICES)), "all"],
        help=f"the slice of the campaigns to run, of {SLICES}; by default the one that the commit's hash chooses, "
        "or all of a test that is named",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Start one worker more than cores: for a third of their time, tests wait for other processes."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" not in os.environ and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) + 1
    return None  # xdist's default


def pytest_configure(config):
    # Set before xdist starts its workers with these options, so that all run the same slice.
    if config.option.slice is None:
        by_name = any("::" in argument for argument in config.args)
        config.option.slice = "all" if by_name else str(slice_of_commit(Path(__file__).parent))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem():
    """Index all cases of a test, including those that are not selected."""
    made = yield
    if isinstance(made, list):
        place_cases([item for item in made if isinstance(item, pytest.Item)])
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselect the other slices, and run slow tests first, so that no worker is left with one at the end."""
    for item in items:
        if item.path.parent.name in PROGRAM_FOLDERS:
            item.add_marker("medium")
    chosen = config.option.slice
    others = [] if chosen == "all" else [item for item in items if not is_of_slice(item, int(chosen))]
    config.hook.pytest_deselected(items=others)
    for test in {item.obj for item in items if hasattr(item, "obj") and is_hypothesis_test(item.obj)}:
        fewer_examples(test)
    selected = set(items).difference(others)
    order = {"slow": 0, "medium": 1}
    items[:] = [item for item in items if item in selected]
    items.sort(key=lambda item: min([order.get(mark.name, 2) for mark in item.iter_markers()], default=2))
    items.sort(key=lambda item: item.path.name != "test_compile.py")  # takes over a minute on one core


def pytest_collection_finish():
    """Exclude imported objects from gc.collect(), which many tests call: saves a third of a second each time."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    chosen = terminalreporter.config.option.slice
    what = "all slices" if chosen == "all" else f"slice {chosen} of {SLICES}; repeat it with --slice={chosen}"
    terminalreporter.write_line(f"campaigns: {what}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Seed each test independently of the previous ones, and end it if it hangs."""
    seed = crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if item.config.getoption("usepdb", False):
        return (yield)
    capture = item.config.pluginmanager.getplugin("capturemanager")
    with Watch(lambda: capture and capture.suspend_global_capture(in_=True)):
        return (yield)


def read_handlers():
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    item.stash[HANDLERS] = read_handlers()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Fail a test that does not restore signal handlers, since Ctrl-C could then end the whole process or group."""
    outcome = yield
    before, after = item.stash[HANDLERS], read_handlers()
    if after != before:
        for number, handler in before.items():
            signal.signal(number, handler)
        pytest.fail(f"handlers of signals were {before} before, and are {after}", pytrace=False)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("a process group is left to the tests that follow", pytrace=False)
    return outcome


@pytest.fixture
def fused_always(monkeypatch):
    """Fuse layers on mini-batches of any size."""
    from tests.nn.fusing import fuse_from

    fuse_from(1, monkeypatch)


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """Return the empty folder that the test's caches are in."""
    root = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(root))
    return root


@pytest.fixture
def no_thread_left():
    """Check that no test leaves a thread of collective batching."""
    from lightning_gnn.collective.workers import THREAD_NAME
    from tests.threads import list_threads

    yield
    gc.collect()
    assert not list_threads(THREAD_NAME)


@pytest.fixture
def interruptible():
    """Restore SIGINT, which shells ignore in background processes and the tests that these start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def record_calls(monkeypatch):
    """Return a function that makes ``owner.name`` record its positional arguments, as it runs, in the list returned."""

    def record(owner, name):
        calls, original = [], getattr(owner, name)

        def recorded(*arguments, **options):
            calls.append(arguments)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, recorded)
        return calls

    return record


@pytest.fixture(autouse=True)
def started_from_a_file(monkeypatch):
    """Let strategies start ranks from an xdist worker, although it runs by python -c."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        monkeypatch.setattr("lightning_gnn.distributed.monitored_ranks._can_run_again", lambda: True)

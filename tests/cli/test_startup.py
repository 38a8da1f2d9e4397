"""Ctrl-C while the command is starting ends it at once, whatever it is importing and whatever that swallows."""

import os
import signal
import subprocess
import sys

import pytest

from lightning_gnn import startup
from tests.cli.command import ROOT

HOOK = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            sys.meta_path.remove(self)
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:  # as some libraries do
                os.write(2, b"swallowed")

sys.meta_path.insert(0, Interrupt())
"""


def start(tmp_path, module, *command):
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return subprocess.run(
        [sys.executable, *command, "--help"],
        env={**os.environ, "PYTHONPATH": path, "INTERRUPT_AT": module, "OMP_NUM_THREADS": "1"},
        # A shell starts what runs in the background with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch", "lightning_gnn.cli.main"])
def test_interrupted_while_importing(module, tmp_path):
    ended = start(tmp_path, module, "-m", "lightning_gnn")
    assert ended.returncode == 130
    assert ended.stderr.strip() == "Interrupted before training began."
    assert not ended.stdout


@pytest.mark.slow
def test_the_installed_script(tmp_path):
    (tmp_path / "lgnn").write_text("from lightning_gnn.cli.main import main\nmain()\n")
    ended = start(tmp_path, "numba", str(tmp_path / "lgnn"))
    assert ended.returncode == 130
    assert ended.stderr.strip() == "Interrupted before training began."


@pytest.mark.parametrize(
    "arguments", [["/opt/own.py"], ["python", "-m", "own"], ["python", "-m", "pytest", "lightning_gnn"]], ids=str
)
def test_a_user_s_own_script_keeps_its_handler(arguments, monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(sys, "argv", ["-m"] if "-m" in arguments else arguments)
        monkeypatch.setattr(sys, "orig_argv", arguments)
        startup.begin()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        monkeypatch.setattr(sys, "argv", ["/opt/bin/lgnn"])
        startup.begin()
        assert signal.getsignal(signal.SIGINT) is startup._end
        startup.done()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)

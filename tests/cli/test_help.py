"""Help, version and Tab completion of the command."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.cli.command import ROOT, run_exactly
from tests.cli.test_conf import compose_config
from tests.patience import PATIENCE


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the script that pip installs for the entry point, first on the PATH."""
    folder = tmp_path_factory.mktemp("bin")
    path = folder / "lgnn"
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom lightning_gnn.cli.main import main\nsys.exit(main())\n")
    path.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_in_bash(script, environment):
    return subprocess.run(
        ["bash", "--norc", "-c", f"set -o pipefail; {script}"],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


def shown(capfd, *arguments):
    """Return the output of the command, run in this process."""
    code, left = run_exactly(*arguments)
    assert not code
    assert left == [*arguments]
    return capfd.readouterr().out


def test_the_short_help_fits_a_screen_and_its_commands_compose(capfd):
    text = shown(capfd, "--help")
    assert len(text.splitlines()) < 20
    commands = re.findall(r"^  (lgnn(?: \S+)*)", text, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        words = [word for word in shlex.split(command)[1:] if word not in ("-m", "plan", "[...]")]
        compose_config(*(word.partition(",")[0] for word in words))
    assert "lgnn --help-all" in text
    assert "install=bash" in text


@pytest.mark.slow
@pytest.mark.parametrize("command", ["", "plan"])
def test_the_long_help(command, capfd):
    text = shown(capfd, *command.split(), "--help-all")
    assert "Examples" in text
    assert f"usage: lgnn {command}".rstrip() in text
    assert ("model: gat, gcn, gin, hetero_sage, hgt, rgat, rgcn, sage" in text) == (command != "plan")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["--help", "--help-all", "--version", "--cfg job"])
def test_a_reader_who_leaves_ends_it_in_silence(arguments):
    reader, writer = os.pipe()
    os.close(reader)  # closed before the command writes
    command = [sys.executable, "-W", "ignore", "-m", "lightning_gnn", *arguments.split()]
    ended = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert ended.stderr == ""
    assert ended.returncode == -13  # SIGPIPE, as for other commands


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "offered"), [("lgnn mod", {"model=", "model.", "mode="}), ("lgnn --nothing", {""})])
def test_the_tab_key_completes(installed, typed, offered):
    # Bash calls this after Tab, through the function that the documented line installs.
    words = typed.split()
    script = (
        f'eval "$(lgnn -sc install=bash)"; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; '
        f'COMP_LINE="{typed}"; COMP_POINT={len(typed)}; complete -p lgnn; hydra_bash_completion; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    ended = run_in_bash(script, installed)
    rule, *found = ended.stdout.splitlines()
    assert rule.endswith("hydra_bash_completion lgnn")
    assert set(found) == offered
    assert ended.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("lgnn model=s", "model=sage"),
        ("lgnn model=gcn trainer.max_", "trainer.max_epochs="),
        ("lgnn experiment=cora_gc", "experiment=cora_gcn experiment=cora_gcn_tuned"),
        ("lgnn -m data.num_n", "data.num_nodes="),
        ("lgnn ckpt_path=./outputs/b", "ckpt_path=./outputs/best.ckpt"),
        ("lgnn report ou", ""),  # no suggestions: the shell itself completes paths
        ("lgnn ~callbacks.last datamodule.num_neighbors=[5,5] model.drop", "model.dropout="),
        ("lgnn seed=", "seed=0"),
    ],
)
def test_groups_keys_and_files_are_offered(typed, offered, tmp_path, capfd, monkeypatch):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/best.ckpt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMP_LINE", typed)
    run_exactly("-sc", "query=bash")
    shown = capfd.readouterr()
    assert shown.out.split() == offered.split()
    assert shown.err == ""

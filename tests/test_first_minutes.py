"""The script that plays a new user runs what the README says, in its order, and tells what became of it."""

import json
import sys

import pytest

from benchmarks import first_minutes

README = first_minutes.README.read_text(encoding="utf-8")
PLAYED = """
```bash
mkdir -p bin outputs   # a comment
echo 'export PLACE=here PATH=$PWD/bin:$PATH' > bin/activate
source bin/activate
test "$PLACE" = here && test "$HOME" != elsewhere && test -z "$SECRET" && echo '{}' > outputs/metrics.json
```

Text with `code`.

```python
from pathlib import Path
Path("outputs/a/checkpoints").mkdir(parents=True)
Path("outputs/a/checkpoints/last.ckpt").write_text("#")
Path("outputs/a/metrics.json").write_text("{}")
```

```
not a command
```

```bash
test -f outputs/…/checkpoints/last.ckpt && cp outputs/…/checkpoints/last.ckpt found
cat ckpt_path=outputs/…/nothing.ckpt
echo 'urlopen error' && false
make test

```
"""


def test_every_command_of_the_readme_is_found_in_its_order():
    lines = README.splitlines()
    inside, first = False, ""
    wanted = []
    for line in lines:
        if line.startswith("```"):
            inside, first = line == "```bash", ""
        elif inside and line.split("#")[0].strip():
            command = line.split(" #")[0].strip()
            first = first or command
            wanted.append((first, command))
    found = first_minutes.commands(README)
    assert [(block, command) for block, command, code in found if not code] == wanted
    blocks = [code for _, _, code in found if code]
    assert len(blocks) == README.count("```python")
    for block in blocks:
        compile(block, "README.md", "exec")


def test_what_is_typed_after_the_installation_finds_what_it_has_made():
    names = [command.split()[0] for _, command, _ in first_minutes.commands(README)]
    assert names[0] == "make"
    assert "lgnn" not in names[: names.index("source")]
    assert "python" not in names[: names.index("source")]


def played(tmp_path, monkeypatch, **options):
    monkeypatch.setenv("HOME", "elsewhere")
    monkeypatch.setenv("SECRET", "1")
    (tmp_path / "home").mkdir()
    python = tmp_path / "there/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return first_minutes.play(PLAYED, tmp_path / "there", tmp_path / "home", **options)


def test_commands_run_one_after_another_as_in_one_shell(tmp_path, monkeypatch):
    steps = played(tmp_path, monkeypatch)
    outcomes = [step.outcome for step in steps]
    assert outcomes == ["done"] * 6 + ["failed", "needs the network", "left out"]
    assert [step.block for step in steps[3:6]] == [
        "mkdir -p bin outputs", "from pathlib import Path", steps[5].command
    ]  # fmt: skip
    assert steps[4].command == "python readme_1.py"
    assert (tmp_path / "there/found").read_text() == "#"
    assert "nothing.ckpt" in steps[6].output
    assert [step.result is not None for step in steps] == [False] * 3 + [True, True] + [False] * 4
    told = first_minutes.milestones(steps, installed=12.0, started=10.0)
    assert told["install_s"] == 2.0
    before = sum(step.seconds for step in steps[:3])
    assert told["first_result_s"] == pytest.approx(before + steps[3].result, abs=0.1)
    assert told["second_result_s"] == pytest.approx(steps[4].result, abs=0.1)
    assert first_minutes.milestones(steps[:3], None, 10.0) == dict.fromkeys(told)


def test_what_takes_long_runs_when_it_is_asked_for(tmp_path, monkeypatch):
    steps = played(tmp_path, monkeypatch, long=True)
    assert steps[-1].outcome == "failed"
    assert "No rule to make target" in steps[-1].output


def test_a_command_that_does_not_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(first_minutes, "LIMIT", 0.5)
    code, output = first_minutes._run("echo begun; sleep 1000 & wait", tmp_path, {"PATH": "/usr/bin:/bin"})
    assert code == -1
    assert output == "begun\n"


def test_the_table_in_the_docs_is_that_of_the_results():
    file = first_minutes.RESULTS / "first_minutes.json"
    if not file.exists():
        pytest.skip("not measured yet: python -m benchmarks.first_minutes")
    page = first_minutes.PAGE.read_text(encoding="utf-8")
    assert first_minutes.with_table(page, json.loads(file.read_text())) == page


def test_a_page_without_its_markers_is_refused():
    with pytest.raises(ValueError, match="first-minutes:start"):
        first_minutes.with_table("nothing", {})


def test_only_what_git_knows_is_copied(tmp_path):
    first_minutes.copy_checkout(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"README.md", "Makefile", "pyproject.toml", "conf"} <= names
    assert not {".git", ".venv", "site"} & names


def test_sizes_are_those_of_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_bytes(b"123")
    (tmp_path / "c").write_bytes(b"12345")
    (tmp_path / "d").symlink_to(tmp_path / "c")
    assert first_minutes.size_of(tmp_path) == 8

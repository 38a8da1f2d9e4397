"""A new user's first minutes: a fresh folder, and every block of the README, one command after another, by the clock.

    python -m benchmarks.first_minutes               # all but what takes long
    python -m benchmarks.first_minutes --long        # the tests and the sweep, too
    python -m benchmarks.first_minutes --data data   # with data sets that lie in a folder, so that none is downloaded

The blocks are read from the README itself, so what is measured is what it says. Home folder, caches and environment are
new, so kernels are compiled as on a new machine; packages come from where pip is told to look for them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS
from benchmarks.machine import machine

ROOT = Path(__file__).parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "get-started.md"
START, END = "<!-- first-minutes:start -->", "<!-- first-minutes:end -->"
LONG = (re.compile(r"make test\b"), re.compile(r"lgnn -m\b"))
"""Commands that take more than minutes."""
STAMPS = (".trains", ".installed")
"""Files of the environment that make leaves when it is complete: for training, and with the tools of developers."""
LIMIT = 1800.0
"""Seconds that a command may take."""
_FENCE = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OFFLINE = re.compile("URLError|urlopen error|Name or service not known|Temporary failure in name|ConnectionError")
_KEPT = re.compile(r"PATH|LANG|LC_.*|TERM|TMPDIR|PIP_.*|.*_proxy|.*_PROXY|SSL_CERT_.*|REQUESTS_CA_BUNDLE")
_SHOWN = 1500


@dataclass
class Step:
    """A command of the README, and what became of it.

    Args:
        block: The first line of its block in the README.
        command: As it stands there; of a block of Python, how it is run.
        outcome: ``"done"``, ``"failed"``, ``"needs the network"`` or ``"left out"``.
        seconds: It took; None if it was left out.
        result: Seconds from its start to the first ``metrics.json`` that it wrote; None if it wrote none.
        output: The end of what a command that failed has printed; of one that needs the network, its last line.
    """

    block: str
    command: str
    outcome: str = "left out"
    seconds: float | None = None
    result: float | None = None
    output: str = ""


def commands(text: str) -> list[tuple[str, str, str]]:
    """Return the first line of its block, the command, and the Python that it runs, if it does, for all of a page."""
    found: list[tuple[str, str, str]] = []
    for block in _FENCE.finditer(text):
        if block[1] == "python":
            number = 1 + sum(code != "" for _, _, code in found)
            found.append((block[2].strip().partition("\n")[0], f"python readme_{number}.py", block[2]))
            continue
        lines = [re.split(r"(?:^|\s+)#(?:\s|$)", line)[0].strip() for line in block[2].splitlines()]
        typed = [line for line in lines if line]
        found += [(typed[0], command, "") for command in typed]
    return found


def play(text: str, folder: Path, home: Path, long: bool = False) -> list[Step]:
    """Run the commands of a page in a folder, as one user would in one shell.

    Args:
        text: Of the page.
        folder: Where.
        home: The user's new home folder.
        long: Also those that take long.
    """
    environment = {key: value for key, value in os.environ.items() if _KEPT.fullmatch(key)}
    outside = [part for part in environment["PATH"].split(os.pathsep) if "VIRTUAL_ENV" not in os.environ or
               not Path(part).is_relative_to(os.environ["VIRTUAL_ENV"])]  # fmt: skip
    environment |= {"PATH": os.pathsep.join(outside), "HOME": str(home), "BROWSER": "true"}
    sourced: list[str] = []
    steps = []
    for block, command, code in commands(text):
        step = Step(block, command)
        steps.append(step)
        if not long and any(pattern.match(command) for pattern in LONG):
            continue
        if code:
            (folder / command.partition(" ")[2]).write_text(code, encoding="utf-8")
        before, begun, started = _results(folder), time.time(), time.perf_counter()
        code_of, output = _run("; ".join([*sourced, filled_in(command, folder)]), folder, environment)
        step.seconds = round(time.perf_counter() - started, 2)
        if new := _results(folder) - before:
            step.result = round(min(path.stat().st_mtime for path in new) - begun, 2)
        if code_of == 0:
            step.outcome = "done"
            if command.startswith(("source ", ". ")):
                sourced.append(command)
        else:
            step.outcome = "needs the network" if _OFFLINE.search(output) else "failed"
            step.output = output.strip().rpartition("\n")[2] if step.outcome != "failed" else output[-_SHOWN:]
    return steps


def filled_in(command: str, folder: Path) -> str:
    """Return a command with the latest file that fits in the place of each path with an ellipsis."""
    words = command.split(" ")
    for i, word in enumerate(words):
        if "…" in word:
            key, equals, pattern = word.rpartition("=")
            found = sorted(folder.glob(pattern.replace("…", "**")), key=lambda path: path.stat().st_mtime)
            if found:
                words[i] = f"{key}{equals}{found[-1].relative_to(folder)}"
    return " ".join(words)


def _results(folder: Path) -> set[Path]:
    return {path for top in ("outputs", "multirun") for path in (folder / top).rglob("metrics.json")}


def _run(command: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run a line in a shell; return its exit code and what it printed. Past the limit all its processes end."""
    with tempfile.TemporaryFile() as output:
        shell = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = shell.wait(LIMIT)
        except BaseException as error:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = -1
        output.seek(0)
        return code, output.read().decode(errors="replace")


def milestones(steps: Sequence[Step], installed: float | None, started: float) -> dict[str, float | None]:
    """Return the seconds of the installation, until the first result, and from typing the second one to having it.

    Args:
        steps: All of them.
        installed: When the installation was complete; None if it was not.
        started: When the first command was typed.
    """
    told = [step for step in steps if step.result is not None]
    before = sum(step.seconds or 0.0 for step in steps[: steps.index(told[0])]) if told else 0.0
    return {
        "install_s": None if installed is None else round(installed - started, 1),
        "first_result_s": round(before + (told[0].result or 0.0), 1) if told else None,
        "second_result_s": round(told[1].result or 0.0, 1) if len(told) > 1 else None,
    }


def copy_checkout(to: Path) -> None:
    """Copy what git knows of, as it is in the working tree."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def table(result: dict[str, Any]) -> str:
    """Return the stopwatch and the commands as Markdown."""
    told = result["milestones"]
    names = {"install_s": "installed", "first_result_s": "first result", "second_result_s": "second result"}
    notes = {
        "install_s": f"{result['install_gb']:.1f} GB" + ", tools of developers included" * result["settings"]["long"],
        "first_result_s": "from the first command on; kernels are compiled once",
        "second_result_s": "from typing the command on",
    }
    lines = ["| | seconds | |", "|---|---|---|"]
    lines += [f"| {name} | {told[key]:.0f} | {notes[key]} |" for key, name in names.items() if told[key] is not None]
    lines += ["", "| block of the README | command | seconds | |", "|---|---|---|---|"]
    before = None
    for step in result["commands"]:
        seconds = "" if step["seconds"] is None else f"{step['seconds']:.3g}"
        block = "" if step["block"] == before else f"`{step['block']}` …"
        lines.append(f"| {block} | `{step['command']}` | {seconds} | {step['outcome']} |")
        before = step["block"]
    told_of = result["machine"]
    return "\n".join(
        [*lines, "", f"On {told_of['cores']} cores of {told_of['cpu']}, {told_of['os']}, {told_of['date']}."]
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser("python -m benchmarks.first_minutes", description=__doc__.partition("\n")[0])
    parser.add_argument("--long", action="store_true", help="also run the commands that take more than minutes")
    parser.add_argument("--data", type=Path, help="a folder to begin with as the user's data/")
    parser.add_argument("--folder", type=Path, help="where to play (default: a temporary folder, which is removed)")
    parser.add_argument("--out", type=Path, default=RESULTS / "first_minutes.json", help="the JSON file")
    args = parser.parse_args(argv)
    described = machine()
    with tempfile.TemporaryDirectory(prefix="first-minutes-") as temporary:
        base = args.folder or Path(temporary)
        folder, home = base / "lightning-gnn", base / "home"
        home.mkdir(parents=True)
        copy_checkout(folder)
        if args.data is not None:
            shutil.copytree(args.data, folder / "data", copy_function=shutil.copyfile)
        started = time.time()
        steps = play(README.read_text(encoding="utf-8"), folder, home, args.long)
        done = [path.stat().st_mtime for path in (folder / ".venv").glob(".*") if path.name in STAMPS]
        installed = min(done, default=None)
        result = {
            "title": "A new user's first minutes",
            "machine": described,
            "settings": {"long": args.long, "data": args.data is not None},
            "milestones": milestones(steps, installed, started),
            "install_gb": round(size_of(folder / ".venv") / 1e9, 2),
            "commands": [asdict(step) for step in steps],
        }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    for step in steps:
        if step.outcome == "failed":
            print(f"\n{step.block} …: {step.command}\n{step.output}")
    if args.out == RESULTS / "first_minutes.json":
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_table(text, result), encoding="utf-8")
    return result


def with_table(text: str, result: dict[str, Any]) -> str:
    """Return a page with the table between its markers.

    Raises:
        ValueError: The markers are not there.
    """
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"there is no {START} … {END}; put both lines where the table belongs")
    return f"{before}{START}\n{table(result)}\n{END}{after}"


if __name__ == "__main__":
    main()

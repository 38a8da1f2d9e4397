"""The command ``lgnn``: finds out what is asked for, and imports no more than that takes."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from importlib import import_module
from io import StringIO

from lightning_gnn import startup

PRINTING = ("cache", "convert", "doctor", "export", "init", "partition", "report", "runs", "tune", "warmup")
"""Commands with arguments of their own, which print and end; each is a file of the folder ``commands``."""
_COMPOSED = ("export", "plan", "predict", "tune", "warmup")  # commands that take what a run takes
_SHOWING = ("--cfg", "-c", "--info")  # flags with which Hydra shows something instead of a run
_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
"""Flags of Hydra behind which another word belongs to them."""


def main() -> None:
    """Run the command; exit codes: 2 for a wrong configuration, 130 and 143 for an interrupted run."""
    _bring_forward(("plan", "predict"))
    if sys.argv[1:2] == ["predict"]:
        sys.argv[1] = "mode=predict"
    if os.getcwd() not in sys.path:  # for _target_=my_module.MyModel
        sys.path.append(os.getcwd())
    arguments = sys.argv[1:]
    command = arguments[0] if arguments else ""
    if command in PRINTING:
        module = import_module(f"lightning_gnn.cli.commands.{command}")
        startup.done()
        with startup.ending_with_the_reader():
            sys.exit(module.main(arguments[1:]))
    elif startup.asks_for_help():
        with startup.ending_with_the_reader():
            _help(command)
    else:
        module = import_module(f"lightning_gnn.cli.commands.{'plan' if command == 'plan' else 'train'}")
        startup.done()
        shows = any(item.partition("=")[0] in _SHOWING for item in arguments)
        with startup.ending_with_the_reader() if shows else nullcontext():
            module.main()


def _bring_forward(commands: Sequence[str]) -> None:
    """Put a command before the flags and overrides that it goes with, in whatever order they were typed."""
    for place, item in enumerate(sys.argv[1:], 1):
        if place == 1 and item in PRINTING:
            return
        if item in commands and sys.argv[place - 1] not in _WITH_VALUE:
            sys.argv.insert(1, sys.argv.pop(place))
            return


def _help(command: str) -> None:
    """Print the version, or let Hydra print help or what the Tab key offers; it knows of no commands."""
    if "--version" in sys.argv:
        from lightning_gnn.cli.versions import versions

        print(", ".join(f"{name} {number}" for name, number in versions().items()))
        return
    if not {"-sc", "--shell-completion"}.isdisjoint(sys.argv) and (line := os.environ.get("COMP_LINE")):
        name, *words = line[: int(os.environ.get("COMP_POINT", len(line)))].split(" ")
        if len(words) == 1:
            print("\n".join(each for each in sorted({*PRINTING, "plan", "predict"}) if each.startswith(words[0])))
        elif words and words[0] in _COMPOSED:
            command = words.pop(0)
        os.environ["COMP_LINE"] = " ".join([name, *words])
        with suppress(SystemExit), redirect_stderr(StringIO()):  # errors would stand in the line that is typed
            _hydra(sys.argv, command)
        return
    argv = [sys.argv[0], *sys.argv[2:]] if command == "plan" else sys.argv
    if "--help-all" in argv:
        argv = ["--help" if item == "--help-all" else item for item in argv]
        argv += ["hydra/help=all"] * (command != "plan")
    _hydra(argv, command)


def _hydra(argv: list[str], command: str) -> None:
    """Let Hydra show what it is asked for of a command's configuration."""
    import hydra

    before, sys.argv = sys.argv, argv
    name = "plan" if command == "plan" else "train"
    try:
        hydra.main(version_base="1.3", config_path="pkg://lightning_gnn.conf", config_name=name)(_never_run)()
    finally:
        sys.argv = before


def _never_run(cfg: object) -> None:
    """Stand for the job where Hydra prints its help instead."""

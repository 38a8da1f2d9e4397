"""The command ``lgnn``: finds out what is asked for, and imports no more than that takes."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from importlib import import_module
from io import StringIO

from lightning_gnn import startup
from lightning_gnn.runtime.messages import removed

PRINTING = ("cache", "convert", "doctor", "export", "init", "partition", "report", "runs", "warmup")
"""Commands with arguments of their own, which print and end; each is a file of the folder ``commands``."""
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
    if command == "tune":
        print(f"error: {removed('lgnn tune')}", file=sys.stderr)
        sys.exit(2)
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
    """Print the version, or let Hydra print help or what the Tab key offers."""
    if "--version" in sys.argv:
        from lightning_gnn.cli.versions import versions

        print(", ".join(f"{name} {number}" for name, number in versions().items()))
        return
    import hydra

    before, name = sys.argv, "plan" if command == "plan" else "train"
    sys.argv = [before[0], *before[1 + (name == "plan") :]]
    if "--help-all" in sys.argv:
        sys.argv = ["--help" if item == "--help-all" else item for item in sys.argv]
        sys.argv += ["hydra/help=all"] * (name != "plan")
    completes = not {"-sc", "--shell-completion"}.isdisjoint(sys.argv) and "COMP_LINE" in os.environ
    try:
        # Errors would stand in the line that is typed.
        with redirect_stderr(StringIO()) if completes else nullcontext():
            hydra.main(version_base="1.3", config_path="pkg://lightning_gnn.conf", config_name=name)(lambda cfg: None)()
    except SystemExit:
        if not completes:
            raise
    finally:
        sys.argv = before

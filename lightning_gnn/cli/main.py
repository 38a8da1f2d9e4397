"""The entry point of ``lgnn``: dispatch to a command, and import only what it needs."""

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib import import_module
from io import StringIO

from lightning_gnn import startup

PRINTING = ("cache", "convert", "doctor", "export", "init", "partition", "report", "runs", "warmup")
"""Commands that parse their own arguments, print and exit; each is a module of the package ``commands``."""
_INFO_FLAGS = ("--cfg", "-c", "--info")  # with these, Hydra prints information and starts no run
_VALUE_FLAGS = ("--cfg", "-c", "--package", "-p", "--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
"""Hydra's flags that take the following word as their value."""


def main() -> None:
    """Run the command; exit codes: 2 for a wrong configuration, 130 and 143 for an interrupted run."""
    _move_to_front(("plan", "predict"))
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
        with _without_collections():
            module = import_module(f"lightning_gnn.cli.commands.{'plan' if command == 'plan' else 'train'}")
        startup.done()
        prints_info = any(item.partition("=")[0] in _INFO_FLAGS for item in arguments)
        with startup.ending_with_the_reader() if prints_info else nullcontext():
            module.main()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Suspend Python's garbage collector, which takes a fifth of the time of imports and finds little."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _move_to_front(commands: Sequence[str]) -> None:
    """Move a command in ``sys.argv`` before its flags and overrides, which may be typed in any order."""
    for index, item in enumerate(sys.argv[1:], 1):
        if index == 1 and item in PRINTING:
            return
        if item in commands and sys.argv[index - 1] not in _VALUE_FLAGS:
            sys.argv.insert(1, sys.argv.pop(index))
            return


def _help(command: str) -> None:
    """Print the version, Hydra's help or its shell completions."""
    if "--version" in sys.argv:
        from lightning_gnn.cli.versions import versions

        print(", ".join(f"{name} {number}" for name, number in versions().items()))
        return
    from lightning_gnn.cli.search_path import run_application

    before, name = sys.argv, "plan" if command == "plan" else "train"
    sys.argv = [before[0], *before[1 + (name == "plan") :]]
    if "--help-all" in sys.argv:
        sys.argv = ["--help" if item == "--help-all" else item for item in sys.argv]
        sys.argv += ["hydra/help=all"] * (name != "plan")
    completes = not {"-sc", "--shell-completion"}.isdisjoint(sys.argv) and "COMP_LINE" in os.environ
    try:
        # Shell completion would insert errors into the command line.
        with redirect_stderr(StringIO()) if completes else nullcontext():
            run_application(lambda cfg: None, name)
    except SystemExit:
        if not completes:
            raise
    finally:
        sys.argv = before

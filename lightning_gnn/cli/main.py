"""The command ``lgnn``: finds out what is asked for, and imports no more than that takes."""

from __future__ import annotations

import sys

import hydra

from lightning_gnn import startup


def main() -> None:
    """Run the command; exit codes: 2 for a wrong configuration, 130 and 143 for an interrupted run."""
    arguments = sys.argv[1:]
    command = arguments[0] if arguments and arguments[0] in ("cache", "doctor", "plan") else "train"
    if command in ("plan", "train") and startup.asks_for_help():
        if command == "plan":
            del sys.argv[1]
        hydra.main(version_base="1.3", config_path="pkg://lightning_gnn.conf", config_name=command)(_never_run)()
    elif "--version" in arguments and command not in ("cache", "doctor"):
        from lightning_gnn.cli.doctor import versions

        print(versions())
    elif command == "cache":
        from lightning_gnn.cli import cache_command

        startup.done()
        sys.exit(cache_command.main(arguments[1:]))
    elif command == "doctor":
        from lightning_gnn.cli import doctor

        startup.done()
        sys.exit(doctor.main(arguments[1:]))
    elif command == "plan":
        from lightning_gnn.cli import plan

        startup.done()
        plan.main()
    else:
        from lightning_gnn.cli import train

        startup.done()
        train.main()


def _never_run(cfg: object) -> None:
    """Stand for the job where Hydra prints its help instead."""

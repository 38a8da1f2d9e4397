"""``lgnn init``: create a small working project to start from."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

_TEMPLATE = Path(__file__).parents[1] / "project"


def main(arguments: Sequence[str] | None = None) -> int:
    """Create the project; return 2 if the folder is not empty or cannot be written."""
    parser = argparse.ArgumentParser(
        "lgnn init",
        description="Write a small project: train.py with a LightningModule of your own, conf/config.yaml, a notebook. "
        "It runs as it is, offline, on a synthetic graph.",
    )
    parser.add_argument("folder", help="a new or an empty one")
    folder = Path(parser.parse_args(arguments).folder)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError("exists already; give a new or an empty folder")
        shutil.copytree(_TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    except OSError as error:
        print(f"error: {folder}: {error}", file=sys.stderr)
        return 2
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(f"  {path}")
    print(f"Try it: cd {folder} && python train.py")
    return 0

"""Expensive results that one process of a test run creates for all."""

import os
from pathlib import Path

from filelock import FileLock


def once(factory, name, make):
    """Return a folder of this name that the first process to request it fills by ``make``, while others wait.

    If ``make`` raises, the next process tries again.
    """
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    done = shared / f"{name}.done"
    with FileLock(shared / f"{name}.lock"):
        if not done.exists():
            folder = factory.mktemp(name)
            make(folder)
            done.write_text(str(folder), encoding="utf-8")
    return Path(done.read_text(encoding="utf-8"))

"""What is made once in a run of the tests, whichever of its processes needs it first."""

import os
from pathlib import Path

from filelock import FileLock


def once(factory, name, make):
    """Return a folder that the first process to ask for it fills, while others that ask wait.

    Args:
        factory: Of pytest, whose folder all processes of a run share.
        name: Of the folder.
        make: Fills the empty folder that it is given. If it raises, the next process tries again.
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

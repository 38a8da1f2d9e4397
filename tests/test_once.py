import threading

import pytest

from tests.once import once


class Factory:
    """Stands in for pytest's, of one process of a run."""

    def __init__(self, base):
        self.base = base

    def getbasetemp(self):
        return self.base

    def mktemp(self, name):
        (folder := self.base / name).mkdir()
        return folder


def test_all_processes_of_a_run_find_what_one_has_made(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    made, found = [], []

    def ask(name):
        (tmp_path / name).mkdir()
        factory = Factory(tmp_path / name)
        found.append(once(factory, "thing", lambda folder: made.append((folder / "file").write_text(name))))

    threads = [threading.Thread(target=ask, args=(f"gw{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(set(found)) == 1
    assert len(found) == 4
    assert found[0].name == "thing"
    assert (found[0] / "file").read_text() == found[0].parent.name


def test_what_failed_is_made_by_the_next(tmp_path):
    with pytest.raises(ZeroDivisionError):
        once(Factory(tmp_path), "thing", lambda folder: 1 / 0)
    (tmp_path / "thing").rmdir()
    assert once(Factory(tmp_path), "thing", lambda folder: None) == tmp_path / "thing"

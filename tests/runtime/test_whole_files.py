import os
import platform
import subprocess
import sys

from lightning_gnn.runtime.files import flush, whole_file, write_whole
from tests.patience import PATIENCE
from tests.refusals import refuses


def test_what_dead_writers_left_goes_and_what_living_ones_write_stays(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=PATIENCE)
    begin = f".x.npy.{platform.node()}-"
    dead = tmp_path / f"{begin}{process.pid}-01234567.part"
    stays = [f"{begin}{os.getpid()}-01234567.part", f".x.npy.elsewhere-{process.pid}-01234567.part", ".x.npy.1.part"]
    for name in (dead.name, *stays):
        (tmp_path / name).write_text("half")
    write_whole(tmp_path / "x.npy", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["x.npy", *stays])


def test_two_writers_of_one_process_do_not_meet(tmp_path):
    path = tmp_path / "file"
    with whole_file(path) as first, whole_file(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first"  # the last one to get the name
    assert list(tmp_path.iterdir()) == [path]


def test_names_are_flushed_where_that_is_possible_and_content_always(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(22, "Invalid argument")

    path = write_whole(tmp_path / "new" / "file", "content")
    monkeypatch.setattr(os, "fsync", refuse)
    flush(path.parent)
    refuses(OSError, "Invalid argument", flush, path)

"""The cache of files: verified once, repaired, private, cleaned up, and never blocking a run."""

import errno
import multiprocessing
import os
import threading
import time
import warnings

import pytest

from lightning_gnn.cli.commands import cache as cache_command
from lightning_gnn.runtime import manifest, store
from lightning_gnn.runtime.store import cache_root, get_or_create, keep, locked
from tests.patience import PATIENCE
from tests.refusals import refuses

KEY, OTHER = "0" * 32, "1" * 32


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path / "root"))
    monkeypatch.setattr(store, "_said", set())
    return tmp_path / "root"


class CachedText:
    """Cached content, with counts of the operations on it."""

    def __init__(self, text="content", sources=()):
        self.text, self.sources = text, sources
        self.made = self.read = 0

    def get(self, key=KEY):
        return get_or_create("topology", key, self._make, self._read, title="a thing", sources=self.sources)

    def _make(self, folder):
        self.made += 1
        (folder / "text").write_text(self.text)
        (folder / "deeper").mkdir()
        (folder / "deeper" / "more").write_bytes(bytes(100))

    def _read(self, folder):
        self.read += 1
        return (folder / "text").read_text()


def settle(monkeypatch):
    """Treat recently written files as old."""
    monkeypatch.setattr(manifest, "_SETTLED_NS", -(10**9))


def count_hashes(monkeypatch):
    names = []
    hash_file = manifest._hash
    monkeypatch.setattr(manifest, "_hash", lambda path: names.append(path.name) or hash_file(path))
    return names


def test_it_is_made_once_and_hashed_once(root, monkeypatch):
    settle(monkeypatch)
    names, thing = count_hashes(monkeypatch), CachedText()
    assert [thing.get() for _ in range(3)] == ["content"] * 3
    assert (thing.made, thing.read) == (1, 3)
    assert sorted(names) == ["more", "text"]
    assert sorted(path.name for path in (root / "topology").iterdir()) == [KEY]


def test_what_was_written_just_now_is_verified_once_more(monkeypatch):
    thing = CachedText()
    assert thing.get() == "content"
    settle(monkeypatch)
    names = count_hashes(monkeypatch)
    assert [thing.get() for _ in range(3)] == ["content"] * 3
    assert sorted(names) == ["more", "text"]
    assert thing.made == 1


@pytest.mark.parametrize("how", ["touched", "copied"])
def test_files_that_look_new_are_verified_and_kept(root, monkeypatch, how):
    settle(monkeypatch)
    thing = CachedText()
    thing.get()
    path = root / "topology" / KEY / "text"
    before = path.stat()
    if how == "copied":
        path.rename(path.with_name("old"))
        path.write_text("content")
        path.with_name("old").unlink()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + (how == "touched")))
    names = count_hashes(monkeypatch)
    assert [thing.get(), thing.get()] == ["content"] * 2
    assert (names, thing.made) == (["text"], 1)


NAME = "manifest.json is missing"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda entry: (entry / "text").write_text("CONTENT"), "text has changed since it was written"),
        (lambda entry: (entry / "text").unlink(), "text is missing"),
        (lambda entry: (entry / "new").write_text(""), "new does not belong there"),
        (lambda entry: (entry / manifest.NAME).write_text("{}"), f"{NAME} or damaged"),
        (lambda entry: (entry.rename(entry.parent / "x"), entry.write_text("a file")), NAME),
    ],
)
def test_damage_is_said_and_healed(root, monkeypatch, damage, message):
    settle(monkeypatch)
    thing = CachedText()
    thing.get()
    time.sleep(0.01)  # advances the file system's clock
    damage(root / "topology" / KEY)
    with pytest.warns(UserWarning, match=rf"{KEY} is damaged or out of date \({message}.*; it is made again"):
        assert thing.get() == "content"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert thing.get() == "content"
    assert thing.made == 2


@pytest.mark.filterwarnings("ignore:.*out of date")
def test_a_source_is_told_by_content_and_read_only_when_it_seems_new(tmp_path, monkeypatch):
    settle(monkeypatch)
    source = tmp_path / "source"
    source.write_text("first")
    thing = CachedText(sources=[source])
    thing.get()
    names = count_hashes(monkeypatch)
    thing.get()
    assert names == []
    before = source.stat()
    time.sleep(0.01)
    source.write_text("FIRST")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))  # like cp -p
    thing.get()
    assert thing.made == 2
    copy = tmp_path / "copy"
    copy.write_text("FIRST")
    copy.replace(source)
    thing.get()
    names.clear()
    thing.get()
    assert (thing.made, names) == (2, [])


def test_a_user_error_while_making_is_raised_and_leaves_nothing(root):
    def fail(folder):
        (folder / "half").write_text("x")
        raise ValueError("edge_index holds node 7")

    refuses(ValueError, "holds node 7", get_or_create, "topology", KEY, fail, lambda folder: 1, title="a thing")
    assert list((root / "topology").iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_full_disk_means_no_cache_and_one_warning(root, number):
    thing = CachedText()

    def full(folder):
        raise OSError(number, os.strerror(number), str(folder))

    thing._make = full
    with pytest.warns(UserWarning, match=r"a thing: cannot be cached in .*; it is made again each time") as said:
        assert [thing.get() for _ in range(3)] == [None] * 3
    assert len(said) == 1
    assert list((root / "topology").iterdir()) == []


def test_a_read_only_store_is_read_and_not_written(root, monkeypatch):
    thing = CachedText()
    thing.get()
    folders = [root, root / "topology", root / "topology" / KEY]
    for folder in folders:
        folder.chmod(0o500)
    try:
        assert thing.get() == "content"
        with pytest.warns(UserWarning, match=r"a thing: cannot be cached in .*it is read-only"):
            assert thing.get(OTHER) is None
        assert thing.made == 1
    finally:
        for folder in folders:
            folder.chmod(0o700)


def test_folders_are_private(root):
    CachedText().get()
    with locked(root, "topology", KEY):
        pass
    for folder in (root, root / "topology", root / "topology" / KEY, root / "locks"):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o722, "of another user"])
def test_a_folder_that_others_own_or_may_write_to_is_not_used(root, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    root.mkdir()
    root.chmod(0o755 if isinstance(mode, str) else mode)
    if isinstance(mode, str) and os.geteuid() == 0:
        os.chown(root, 12345, -1)
    elif isinstance(mode, str):
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    said = r"files are not cached in .*root, which others own or may write to"
    with pytest.warns(UserWarning, match=said) as caught:
        found = [cache_root(), CachedText().get(), CachedText().get()]
    assert found[0] != root
    assert found[1:] == ["content"] * 2
    assert not list(root.iterdir())
    if not isinstance(mode, str) or os.geteuid() == 0:
        assert (tmp_path / "own" / "lightning-gnn" / "topology" / KEY).is_dir()
        assert len(caught) == 1


def test_the_users_cache_folder_is_the_default(tmp_path, monkeypatch):
    monkeypatch.delenv("LIGHTNING_GNN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "lightning-gnn"
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", "")
    assert cache_root() == tmp_path / "xdg" / "lightning-gnn"


def write_half(ready, dies):
    def make(folder):
        (folder / "half").write_text("x")
        ready.set()
        if dies:
            os._exit(9)
        time.sleep(300)

    get_or_create("topology", KEY, make, lambda folder: 1, title="a thing")


def test_what_dead_writers_left_is_removed_and_what_living_ones_write_stays(root):
    context = multiprocessing.get_context("fork")  # without importing everything again
    ready = [context.Event(), context.Event()]
    dead, living = (context.Process(target=write_half, args=(ready[at], at == 0), daemon=True) for at in (0, 1))
    try:
        dead.start()
        dead.join(timeout=PATIENCE)
        (left,) = (root / "topology").iterdir()
        assert left.name.endswith(".part")
        living.start()
        assert ready[1].wait(timeout=PATIENCE)
        (part,) = (root / "topology").iterdir()  # the same key: the living process cleaned up before it wrote
        assert part == left
        assert CachedText().get(OTHER) == "content"
        assert (part / "half").exists()
    finally:
        living.kill()
        living.join(timeout=PATIENCE)
    CachedText().get("2" * 32)
    assert sorted(path.name for path in (root / "topology").iterdir()) == [OTHER, "2" * 32]


def test_of_several_threads_one_makes_it():
    thing, found = CachedText(), []
    make = thing._make
    thing._make = lambda folder: time.sleep(0.05) or make(folder)
    threads = [threading.Thread(target=lambda: found.append(thing.get())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    assert found == ["content"] * 4
    assert thing.made == 1


# -- lgnn cache


def run_cache_command(capsys, *arguments):
    code = cache_command.main(arguments)
    return code, capsys.readouterr().out


def test_the_command_lists_and_clears(root, capsys):
    CachedText().get()
    keep("plans", OTHER, lambda folder: (folder / "plan.yaml").write_text("x" * 2000), title="plan for [a machine]")
    code, text = run_cache_command(capsys)
    assert code == 0
    assert "topology" in text
    assert "plan for [a machine]" in text
    assert "2 entries, " in text
    code, text = run_cache_command(capsys, "--clear", "plans")
    assert (code, text.splitlines()[0][:25]) == (0, "plans: 1 entry removed, 2")
    assert "topology: 1 entry removed" in run_cache_command(capsys, "--clear")[1]
    assert "0 entries, 0 bytes in" in run_cache_command(capsys)[1]


def test_clearing_leaves_what_is_in_use_and_what_is_not_ours(root, capsys):
    CachedText().get()
    (root / "topology" / "my own graphs").mkdir()
    (root / "notes.txt").write_text("mine")
    with locked(root, "topology", KEY):
        code, text = run_cache_command(capsys, "--clear")
        assert (code, "is in use and stays" in text) == (0, True)
    run_cache_command(capsys, "--clear")
    assert [path.name for path in (root / "topology").iterdir()] == ["my own graphs"]
    assert (root / "notes.txt").exists()

"""Features on disk: equal to those in memory for any announced reads, cached by Belady's rule, within their budget."""

import errno
import gc
import multiprocessing
import os
import pickle
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_gnn.ops  # noqa: F401  registers the operators
from benchmarks.data.disk import optimum
from lightning_gnn.features import DiskFeatures, FeatureTable, disk_reads, read_queue
from lightning_gnn.features.disk_cache import NEVER, BeladyCache
from lightning_gnn.features.feature_file import BLOCK_BYTES, FeatureFile
from lightning_gnn.features.table import FEATURE_DTYPES
from tests.patience import PATIENCE
from tests.refusals import refuses


def open_table(path, slots):
    file = FeatureFile.open(path)
    return DiskFeatures(file, DiskFeatures.least_bytes(file) + max(0, slots - 64) * DiskFeatures.slot_bytes(file))


def save_array(x, path):
    return FeatureTable(x).save(path)


def draw_numbers(rows, columns, dtype=torch.float32, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def disable_queues():
    """Make threads read one block at a time, as on systems without io_uring."""
    return patch.object(disk_reads, "_create_queues", list)


@pytest.mark.medium
@pytest.mark.parametrize("queued", [True, False])
@given(data=st.data())
def test_reads_equal_memory_whatever_is_announced(queued, data):
    rows, columns = data.draw(st.integers(1, 400)), data.draw(st.sampled_from([1, 3, 50, 600, 1025, 2500]))
    dtype = data.draw(st.sampled_from(FEATURE_DTYPES))
    x = draw_numbers(rows, columns, dtype)
    some = st.lists(st.integers(0, rows - 1), max_size=40)
    reads = data.draw(st.lists(some, max_size=12))
    announced = data.draw(st.integers(0, 12))
    wrong = data.draw(some)
    with TemporaryDirectory() as folder:
        with nullcontext() if queued else disable_queues():
            table = open_table(save_array(x, Path(folder, "x.npy")), data.draw(st.integers(64, 128)))
        assert table.claim()
        assert not table.claim()
        for read in reads[:announced]:
            table.announce(torch.tensor(read, dtype=torch.int32))
        for number, read in enumerate(reads):
            if number < announced:
                table.advance()
            elif number == announced:
                table.release()
            n_id = torch.tensor(read, dtype=torch.int64)
            assert torch.equal(table.gather(n_id), x[n_id])
            unannounced = torch.tensor(wrong, dtype=torch.int64)
            assert torch.equal(table.gather(unannounced), x[unannounced])
        table.close()


def test_a_table_is_collected_while_a_thread_starts(tmp_path):
    """Joining threads takes a lock of ``threading`` that the starting thread holds."""
    table = open_table(save_array(draw_numbers(100, 8), tmp_path / "x.npy"), 64)
    table.gather(torch.arange(100))
    table.itself, released = table, weakref.ref(table)
    gc.disable()
    del table
    with getattr(threading, "_shutdown_locks_lock", nullcontext()):
        gc.enable()
        gc.collect()
    assert released() is None


@pytest.mark.parametrize("columns", [200, 1025, 40_000])
def test_more_reads_than_a_queue_holds(tmp_path, columns):
    """Ranges of one, two and 40 blocks; half of a queue holds 128 blocks, or a megabyte."""
    x = draw_numbers(3000 if columns < 40_000 else 100, columns)
    table = open_table(save_array(x, tmp_path / "x.npy"), 200)
    if not table.direct:
        pytest.skip("the file system has no direct reads")
    for step in (11, 2, 1):  # the second time, some are cached
        n_id = torch.randperm(x.size(0), generator=torch.Generator().manual_seed(step))[::step]
        assert torch.equal(table.gather(n_id), x[n_id])


def test_a_read_that_cannot_be_queued_is_made_at_once_and_explained(tmp_path):
    x = draw_numbers(2000, 200)
    table = open_table(save_array(x, tmp_path / "x.npy"), 64)
    _, queue = table._reader._idle_buffers[0]
    if queue is None:
        pytest.skip("the system has no queues")
    queue.state[0] += 1  # simulates a fork: the kernel has not submitted this entry
    assert torch.equal(table.gather(torch.arange(0, 2000, 3)), x[::3])
    queue.state[0] -= 1
    os.truncate(tmp_path / "x.npy", table.file.offset + 3 * BLOCK_BYTES + 100)
    with pytest.raises(ValueError, match=r"was truncated while in use: a read at byte \d+ returned \d+ of"):
        table.gather(torch.arange(0, 2000, 7))
    refuses(ValueError, r"x\.npy", FeatureFile.open, tmp_path / "x.npy")


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="processes cannot be forked here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("queued", [True, False])
def test_a_forked_process_reads_for_itself(tmp_path, queued):
    x = draw_numbers(3000, 200)
    path = save_array(x, tmp_path / "x.npy")
    with nullcontext() if queued else disable_queues():
        table = open_table(path, 64)
        n_id = torch.arange(0, 3000, 3)
        assert torch.equal(table.gather(n_id), x[n_id])

        def child(equal):
            torch.set_num_threads(1)
            same = torch.equal(table.gather(n_id + 1), x[n_id + 1])
            queue = table._reader._idle_buffers[0][1]
            equal.value = same and (queue is None or read_queue.submit(queue.state, queue.reads, queue.got, 0, 1) == 1)

        context = multiprocessing.get_context("fork")
        equal = context.Value("b", False)
        process = context.Process(target=child, args=(equal,))
        process.start()
        assert torch.equal(table.gather(n_id + 2), x[n_id + 2])
        process.join(timeout=PATIENCE)
        hangs = process.is_alive()
        process.kill()
        process.join()
    assert not hangs
    assert equal.value


def test_where_the_system_has_no_queues_or_no_direct_reads_it_goes_on(tmp_path, monkeypatch):
    x, real, said = draw_numbers(500, 200), os.open, []
    path = save_array(x, tmp_path / "x.npy")

    def refusing(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads")
        return real(path, flags, *more)

    with monkeypatch.context() as patch:
        patch.setattr(read_queue.platform, "machine", lambda: "riscv64")
        table = open_table(path, 64)
        assert all(queue is None for _, queue in table._reader._idle_buffers)
        assert torch.equal(table.gather(torch.arange(0, 500, 3)), x[::3])
    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(disk_reads, "rank_zero_info", said.append)
    table = open_table(path, 100)
    assert not table.direct
    assert [f"{path} is read through the page cache, because its file system does not support direct I/O"] == said
    assert torch.equal(table.gather(torch.tensor([499, 3])), x[[499, 3]])


def test_only_blocks_with_what_is_asked_for_are_read_and_each_once(tmp_path):
    table = open_table(save_array(draw_numbers(5000, 200), tmp_path / "x.npy"), 64)
    file = table.file
    n_id = torch.tensor([4999, 7, 0, 7, 2500, 8])
    table.gather(n_id)
    begin = [file.offset + v * 800 for v in n_id.tolist()]
    blocks = {block for at in begin for block in range(at // BLOCK_BYTES, (at + 799) // BLOCK_BYTES + 1)}
    assert table.counts.blocks == len(blocks)
    assert table.counts.rows == 6


def count_misses(reads, slots):
    """Count cache misses by Belady's rule: of all available rows, retain those needed soonest."""
    cached, misses = set(), 0
    for number, read in enumerate(reads):
        misses += len(set(read) - cached)

        def soonest(row, number=number):
            return next((at for at, later in enumerate(reads[number + 1 :]) if row in later), NEVER)

        cached = set(sorted(cached | set(read), key=soonest)[:slots])
    return misses


@given(st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=25), *map(st.integers, [1, 1, 1], [20, 40, 6]))
def test_what_is_kept_follows_beladys_rule(reads, slots, known, rows_per_block):
    where = BeladyCache(31, slots, 64)
    misses, announced, spare = 0, 0, np.zeros(31, bool)  # spare rows are cached, but have not been requested
    for number, read in enumerate(reads):
        while announced < min(len(reads), number + known):
            where.announce(np.array(reads[announced], np.int64))
            announced += 1
        where.advance()
        missing = np.array(sorted({row for row in read if where.slot[row] < 0}), np.int64)
        misses += missing.size
        before, spare[read] = where.slot >= 0, False
        where.keep(missing)
        kept = where.slot >= 0
        assert not (before & ~kept & ~spare).any() or (where.next_read[spare & kept] < NEVER).all(), "spare go first"
        where.fill(missing, np.minimum(missing + rows_per_block, 31))
        assert (where.slot[kept] >= 0).all(), "spare rows evict no others"
        spare = np.where(kept, spare, where.slot >= 0)
        occupied = np.flatnonzero(where.slot >= 0)
        assert len({*where.slot[occupied].tolist()}) == occupied.size == where._state.counts[0] <= slots
        for row in range(31):
            coming = [at for at in range(number + 1, announced) if row in reads[at]]
            assert where.next_read[row] == (coming[0] if coming else NEVER)
    if known >= len(reads):
        assert misses == count_misses(reads, slots)


def gather_announced(table, reads, lookahead):
    """Gather rows with a window of announced reads, and return them as one tensor."""
    gathered = []
    for number, read in enumerate(reads):
        if lookahead:
            for later in reads[number + lookahead - 1 if number else 0 : number + lookahead]:
                table.announce(later)
            table.advance()
        gathered.append(table.gather(read))
    return torch.cat(gathered)


def test_rows_of_a_window_are_read_once_where_memory_suffices(tmp_path):
    x = draw_numbers(4000, 300)
    table = open_table(save_array(x, tmp_path / "x.npy"), 1000)
    reads = [torch.randint(0, 4000, (50,), generator=torch.Generator().manual_seed(i % 7)) for i in range(14)]
    assert torch.equal(gather_announced(table, reads, 14), x[torch.cat(reads)])
    begin = table.file.offset + torch.cat(reads).unique() * table.row_bytes
    blocks = torch.cat([begin // BLOCK_BYTES, (begin + table.row_bytes - 1) // BLOCK_BYTES]).unique().numel()
    assert table.counts.blocks < 1.5 * blocks, "rows of blocks read for other rows are cached"


@pytest.mark.medium
@given(data=st.data())
def test_each_block_is_read_once_where_all_rows_fit(data):
    columns = data.draw(st.sampled_from([1, 8, 32, 50, 600, 1025]))
    rows = data.draw(st.integers(1, min(400, 60_000 // columns)))  # fewer blocks than one range may have
    some = st.lists(st.integers(0, rows - 1), max_size=40).map(lambda read: torch.tensor(read, dtype=torch.int64))
    reads, x = data.draw(st.lists(some, min_size=1, max_size=12)), draw_numbers(rows, columns)
    with TemporaryDirectory() as folder:
        table = open_table(save_array(x, Path(folder, "x.npy")), rows)
        assert torch.equal(gather_announced(table, reads, data.draw(st.integers(0, 5))), x[torch.cat(reads)])
        table.close()
    # A row in two blocks is complete in neither, so the optimal reader also reads a block again for it.
    assert table.counts.blocks == optimum([read.numpy() for read in reads], table.file, rows)
    begin = table.file.offset + torch.cat(reads) * table.row_bytes
    assert columns not in (1, 8, 32) or table.counts.blocks == (begin // BLOCK_BYTES).unique().numel()


@pytest.mark.parametrize("lookahead", [0, 4, 30])
def test_filling_free_slots_reads_no_more_blocks(tmp_path, lookahead):
    path, random = save_array(draw_numbers(2000, 50), tmp_path / "x.npy"), torch.Generator().manual_seed(0)
    reads = [(torch.rand(60, generator=random) ** 3 * 2000).long() * 7 % 2000 for _ in range(60)]
    for slots in (64, 400, 1000, 2000):
        table, before = open_table(path, slots), open_table(path, slots)
        gather_announced(table, reads, lookahead)
        with patch.object(BeladyCache, "fill"):
            gather_announced(before, reads, lookahead)
        assert table.counts.blocks <= before.counts.blocks


def test_rows_that_a_truncated_file_lacks_are_not_cached(tmp_path):
    table = open_table(save_array(draw_numbers(100, 32), tmp_path / "x.npy"), 100)
    os.truncate(tmp_path / "x.npy", table.file.offset + 20 * table.row_bytes)
    with pytest.raises(ValueError, match=r"x\.npy was truncated"):
        gather_announced(table, [torch.tensor([3]), torch.tensor([25])], 2)


def test_other_files_are_refused(tmp_path):
    refuses(FileNotFoundError, "does not exist", DiskFeatures, tmp_path / "none.npy", "10MB")
    for name, array, error, said in (
        ("ids", np.arange(10), TypeError, "must be float32"),
        ("bytes", np.ones((5, 4), np.int8), TypeError, "must be float32"),
        ("columns", np.asfortranarray(np.ones((5, 4), np.float32)), ValueError, "column-major"),
    ):
        np.save(tmp_path / f"{name}.npy", array)
        refuses(error, said, DiskFeatures, tmp_path / f"{name}.npy", "10MB")


@pytest.mark.medium
def test_nothing_is_left_behind_and_a_copy_is_one_of_its_own(tmp_path):
    path = save_array(draw_numbers(200, 20), tmp_path / "x.npy")
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd")) if os.path.exists("/proc") else 0
    table = open_table(path, 100)
    rows = table.gather(torch.arange(200))
    other = pickle.loads(pickle.dumps(table))
    assert torch.equal(other.gather(torch.arange(200)), rows)
    other.close()
    other.close()
    del table, other
    gc.collect()
    assert threading.active_count() == threads
    assert not files or len(os.listdir("/proc/self/fd")) == files

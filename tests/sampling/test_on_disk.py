"""DataModules with features on disk yield the same mini-batches as from memory, and leave no threads or files."""

import copy
import gc
import threading
from dataclasses import replace

import pytest
import pytorch_lightning as pl
import torch
from torch_geometric.data import Data

from benchmarks.data.disk import optimum
from lightning_gnn import CollectiveDataModule, NeighborDataModule, NeighborSampler
from lightning_gnn.datasets.folder import load_folder, save_folder
from lightning_gnn.features import DiskFeatures, FeatureTable, disk_reads
from lightning_gnn.features.disk_cache import BeladyCache
from lightning_gnn.loading import MiniBatchPipeline
from lightning_gnn.loading.prefetch import lookahead as prefetching
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.runtime.files import write_whole
from lightning_gnn.runtime.thread_pipeline import join_abandoned
from tests.batch_checks import assert_same_batches
from tests.patience import PATIENCE
from tests.sampling.cases import GRAPHS

NODES = 6000
MEMORY = "4MB"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    random = torch.Generator().manual_seed(0)
    places = torch.randint(0, NODES, (2, 30_000), generator=random)
    data = Data(
        x=torch.randn(NODES, 60, generator=random),
        y=torch.randint(0, 4, (NODES,), generator=random),
        edge_index=places * places.flip(0) // NODES,
        train_mask=torch.rand(NODES, generator=random) < 0.1,
        val_mask=torch.rand(NODES, generator=random) < 0.05,
    )
    root = tmp_path_factory.mktemp("graph") / "graph"
    save_folder(data, root)
    return root


def save_features(x, path, dtype="float32"):
    return FeatureTable(x.to(getattr(torch, dtype))).save(path)


def build(data, kind=NeighborDataModule, **options):
    more = {"num_neighbors": [4, 3], "batch_size": 50, "seed": 7}
    return kind(data, **{**more, **options})


def find_table(loader):
    (table,) = loader.pipeline.tables.values()
    return table


def replace_table(loader, blocks):
    """Replace a loader's table by one that caches ``blocks`` blocks beyond its minimum; return it."""
    file = find_table(loader).file
    table = loader.pipeline.tables["x"] = DiskFeatures(file, DiskFeatures.least_bytes(file) + 256 * blocks)
    return table


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"lookahead": 0}, {"lookahead": 2}, {"lookahead": "20kB"}, {"store": True}])
def test_mini_batches_equal_those_from_memory(folder, workers, options):
    data = load_folder(folder)
    options = {**options, **({"store": folder / "x.npy"} if "store" in options else {})}
    plain = build(data, num_workers=workers).train_dataloader()
    disk = build(data, num_workers=workers, memory=MEMORY, **options).train_dataloader()
    for _ in range(2):
        assert_same_batches(disk, plain)
    counts = find_table(disk).counts
    assert 0 < counts.hits < counts.rows
    assert find_table(disk).num_bytes < 4_000_000


@pytest.mark.medium
def test_looking_ahead_reads_less_and_the_same_each_time(folder):
    data, blocks = load_folder(folder), {}
    for lookahead, workers in ((0, 0), (3, 0), (11, 0), (11, 2), (11, 3)):
        loader = build(data, num_workers=workers, memory="6MB", lookahead=lookahead).train_dataloader()
        table = replace_table(loader, 400)  # the same for each of them
        for _ in loader:
            pass
        blocks[lookahead, workers] = table.counts.blocks
    assert blocks[11, 0] == blocks[11, 2] == blocks[11, 3], (
        "what is read follows from the mini-batches, never from time"
    )
    assert blocks[11, 0] < blocks[3, 0] < blocks[0, 0]


def test_types_share_one_memory(tmp_path):
    data = GRAPHS["typed"]()
    store = {kind: save_features(data[kind].x, tmp_path / f"{kind}.npy") for kind in ("paper", "author")}
    tables = build(data, memory="8MB", store=store).train_dataloader().pipeline.tables
    assert {*tables} == {("paper", "x"), ("author", "x")}
    with pytest.raises(ValueError, match="no such node type: 'editor'; use author, paper, venue"):
        build(data, memory="8MB", store={"editor": store["paper"]})
    with pytest.raises(TypeError, match="a heterogeneous graph requires one file per node type"):
        build(data, memory="8MB", store=store["paper"])


def test_features_may_lie_in_the_store_alone(folder):
    data = load_folder(folder)
    expected = next(iter(build(data).train_dataloader()))
    x = data.x
    del data.x
    data.num_nodes = NODES
    module = build(data, memory=MEMORY, store=folder / "x.npy", inference="full")
    batch = next(iter(module.train_dataloader()))
    assert torch.equal(batch.x, expected.x)
    assert torch.equal(next(iter(module.val_dataloader())).x, x)
    assert "x" not in data


@pytest.mark.slow
@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_store_with_other_numbers_than_the_graph_is_refused(folder, tmp_path, dtype, mmap):
    data = load_folder(folder, mmap=mmap)
    data.x = data.x.clone() if not mmap else data.x
    data.x[5, 1], data.x[9] = 1e-6, 0.0  # small relative to the others
    store = save_features(data.x, tmp_path / "x.npy", dtype)
    (batch, *_) = build(data, memory=MEMORY, check_features=False, store=store).train_dataloader()
    torch.testing.assert_close(batch.x.float(), data.x[batch.n_id], rtol=0.01, atol=0.02)
    if dtype != "float32":  # both from the same numbers
        less = copy.copy(data)
        less.x = data.x.bfloat16()
        build(less, memory=MEMORY, check_features=False, store=store)
    for wrong in (data.x * 1.02, data.x.roll(1, 0), data.x.index_fill(0, torch.tensor([NODES - 1]), float("nan"))):
        other = copy.copy(data)
        other.x = wrong
        with pytest.raises(ValueError, match=r"x\.npy and data\.x differ: column \d+ of row \d+ is"):
            build(other, memory=MEMORY, check_features=False, store=store)
    nan = data.x.clone()
    nan[0, 3] = float("nan")
    both = copy.copy(data)
    both.x = nan
    build(both, memory=MEMORY, check_features=False, store=save_features(nan, tmp_path / "nan.npy", dtype))
    other.x = nan
    said = r"column 3 of row 0 is \S+ in the file and nan in data\.x \(1 of 258 compared rows differ\); write"
    with pytest.raises(ValueError, match=said):
        build(other, memory=MEMORY, check_features=False, store=store)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float64])
def test_a_store_of_floats_stands_for_other_numbers_of_the_same_value(folder, tmp_path, dtype):
    data = load_folder(folder)
    data.x = (10 * data.x.abs()).to(dtype)
    store = save_features(data.x, tmp_path / "x.npy")
    (batch, *_) = build(data, memory=MEMORY, store=store).train_dataloader()
    assert torch.equal(batch.x, data.x[batch.n_id].float())
    data.x[NODES - 1] = ~data.x[NODES - 1] if dtype is torch.bool else data.x[NODES - 1] + 1
    with pytest.raises(ValueError, match=r"x differ: column"):
        build(data, memory=MEMORY, store=store)


class OwnSampler(NeighborSampler):
    """A sampler that does not accept keys, and counts its calls."""

    calls = 0

    def sample_from_nodes(self, inputs):
        self.calls += 1
        return super().sample_from_nodes(inputs)


def test_a_sampler_of_the_users_own_is_not_run_ahead(folder):
    data = load_folder(folder)
    own = OwnSampler(data, [4, 3])
    loader = build(data, node_sampler=own, num_neighbors=None, memory=MEMORY).train_dataloader()
    assert own.calls == 0
    for number, batch in enumerate(loader, 1):
        assert own.calls == number
        assert torch.equal(batch.x, data.x[batch.n_id])


def train_state(data, epochs=2, resume=None, root=None, **options):
    pl.seed_everything(5)
    module = NodeClassifier(GraphSAGE(60, 8, 2, out_channels=4), num_classes=4)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        val_check_interval=4,
        default_root_dir=root,
    )
    trainer.fit(module, build(data, num_workers=2, **options), ckpt_path=resume)
    return module, trainer


@pytest.mark.slow
def test_training_validation_between_and_resuming(folder, tmp_path):
    data = load_folder(folder)
    expected, _ = train_state(data)
    _, trainer = train_state(data, epochs=1, memory=MEMORY)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed, _ = train_state(data, resume=tmp_path / "one.ckpt", memory="5MB", lookahead=3)
    whole, _ = train_state(data, memory=MEMORY)
    for found in (resumed, whole):
        for name, value in expected.state_dict().items():
            assert torch.equal(found.state_dict()[name], value), name


@pytest.mark.medium
def test_stopping_early_leaves_no_thread_and_lets_others_look_ahead(folder):
    loader = build(load_folder(folder), num_workers=2, memory=MEMORY).train_dataloader()
    gc.collect()
    idle = {thread.name for thread in threading.enumerate()}
    first, second = iter(loader), iter(loader)
    next(first), next(second)  # the second one reads without looking ahead
    first.close()
    del second
    gc.collect()
    join_abandoned()  # as the next epoch does
    left = {thread.name for thread in threading.enumerate()} - idle
    assert all(name.startswith("lightning-gnn-disk") for name in left)  # threads of the table, which still exists
    table = find_table(loader)
    assert table.claim()
    assert table._cache.announced == 0
    table.release()
    (batch, *_) = loader
    assert torch.equal(batch.x, load_folder(folder).x[batch.n_id])


@pytest.mark.medium
@pytest.mark.parametrize("kind", [NeighborDataModule, CollectiveDataModule])
def test_an_abandoned_epoch_is_collected_by_a_thread_that_reads_for_another(folder, kind, monkeypatch):
    loader = build(load_folder(folder), kind, num_workers=2, memory=MEMORY).train_dataloader()
    idle = {*threading.enumerate()}
    abandoned = [iter(loader)]
    next(abandoned[0])
    abandoned.append(abandoned)  # a cycle: only the garbage collector frees it
    threads = {*threading.enumerate()} - idle
    real, collected = disk_reads.DirectReader._read, []

    def collecting(self, *arguments):
        collected.append(gc.collect())
        return real(self, *arguments)

    plain = [batch.n_id for batch in build(load_folder(folder), kind).train_dataloader()]
    gc.collect()
    monkeypatch.setattr(disk_reads.DirectReader, "_read", collecting)
    del abandoned
    list(loader)
    assert len(collected) > len(plain) / 2
    monkeypatch.undo()
    for thread in threads:
        if not thread.name.startswith("lightning-gnn-disk"):  # threads of the table, which still exists
            thread.join(PATIENCE)
            assert not thread.is_alive()
    table = find_table(loader)
    assert table.claim()
    assert table.announced == 0


def test_a_failing_sampler_is_told_in_its_turn(folder, monkeypatch):
    loader = build(load_folder(folder), num_workers=2, memory=MEMORY, lookahead=8).train_dataloader()
    find_table(loader)
    real = MiniBatchPipeline.sample

    def failing(self, task):
        if task.index == 5:
            raise RuntimeError("no neighbours today")
        return real(self, task)

    monkeypatch.setattr(MiniBatchPipeline, "sample", failing)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    with pytest.raises(RuntimeError, match="no neighbours today"):
        next(batches)
    assert find_table(loader).claim()


def test_a_disk_that_fails_ends_the_epoch(folder, monkeypatch):
    loader = build(load_folder(folder), num_workers=2, memory=MEMORY).train_dataloader()
    real, calls = disk_reads.DirectReader._read, []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) > 4:
            raise OSError(5, "the disk is gone")
        return real(self, *arguments)

    monkeypatch.setattr(disk_reads.DirectReader, "_read", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        list(loader)
    monkeypatch.undo()
    for batch in loader:
        assert torch.equal(batch.x, load_folder(folder).x[batch.n_id])
        break


def test_the_window_is_full_at_first_but_for_a_bound_and_keeps_to_its_bytes():
    class One:
        num_bytes = 10

    first = prefetching._FIRST_WINDOW + 1
    for most, size, longest, count in (
        (0, None, 1, 30),
        (5, None, 6, 30),
        (100, 70, 8, 30),
        (100, 5, 1, 30),
        (first + 20, None, first + 21, 4 * first),
    ):
        ahead, seen = 0, []
        for _, new in prefetching._window(
            [(One(), False) for _ in range(count)], most, size, prefetching._FIRST_WINDOW, []
        ):
            ahead += len(new)
            seen.append(ahead)
            ahead -= 1
        assert len(seen) == count
        assert max(seen) == longest
        assert seen[0] == min(longest, first)


def test_an_epoch_reads_as_little_as_who_knows_all_of_it(folder):
    loader = build(load_folder(folder), memory="6MB", store=folder / "x.npy").train_dataloader()
    table = replace_table(loader, 600)
    trace = [batch.n_id.numpy() for batch in loader]
    assert table.counts.blocks <= 1.01 * optimum(trace, table.file, table.cache_rows)


@pytest.mark.medium
@pytest.mark.parametrize("kind", [NeighborDataModule, CollectiveDataModule])
@pytest.mark.parametrize("between", ["nothing", "another loader", "a part of an epoch", "a leap"])
def test_what_the_next_epoch_begins_with_is_announced_once_unless_others_come_between(
    folder, between, kind, record_calls
):
    data = load_folder(folder)
    loader, plain = (
        build(data, kind, num_workers=1, **options).train_dataloader() for options in ({"memory": MEMORY}, {})
    )
    table = find_table(loader)
    list(loader), list(plain)
    assert table.announced == len(loader.lookahead._next_epoch_batches) > 0
    if between == "another loader":
        assert table.claim()
        assert table.announced == 0
        table.announce(torch.arange(50))
        table.release()
    elif between == "a part of an epoch":
        for one in (loader, plain):
            batches = iter(one)
            next(batches)
            batches.close()
        join_abandoned()
        assert table.announced == 0
    elif between == "a leap":
        for one in (loader, plain):
            one.sampler.set_epoch(5)
    known = len(loader.lookahead._next_epoch_batches) if between == "nothing" else 0
    announced = record_calls(BeladyCache, "announce")
    assert_same_batches(loader, plain)
    assert table.announced == len(loader.lookahead._next_epoch_batches)
    assert len(announced) == len(loader) - known + len(loader.lookahead._next_epoch_batches)


@pytest.mark.medium
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_ends_with_what_the_next_one_begins_with(tmp_path, workers, record_calls):
    random, nodes = torch.Generator().manual_seed(0), 20_000  # an epoch reads a part of them
    data = Data(
        x=torch.randn(nodes, 60, generator=random),
        y=torch.randint(0, 4, (nodes,), generator=random),
        edge_index=torch.randint(0, nodes, (2, 8 * nodes), generator=random),
        train_mask=torch.rand(nodes, generator=random) < 0.015,
    )
    save_folder(data, tmp_path / "graph")
    data = load_folder(tmp_path / "graph")
    plain = build(data, num_workers=workers, batch_size=25).train_dataloader()
    expected = [[batch.n_id for batch in plain] for _ in range(4)]
    blocks = {}
    for alone in (True, False):
        loader = build(data, num_workers=workers, batch_size=25, memory="9MB").train_dataloader()
        table = replace_table(loader, 1500)
        loader.is_last = (lambda epoch: True) if alone else None
        draws, announced = record_calls(MiniBatchPipeline, "sample"), record_calls(BeladyCache, "announce")
        for epoch in expected:
            for batch, n_id in zip(loader, epoch, strict=True):
                assert torch.equal(batch.n_id, n_id)
                assert torch.equal(batch.x, data.x[n_id])
        drawn = [(task.epoch, task.index) for _, task in draws]
        assert len(set(drawn)) == len(drawn), "each is sampled once, also if the epoch before has sampled it"
        assert len(announced) == len(drawn), "and announced once"
        blocks[alone] = table.counts.blocks
    best = optimum([n_id.numpy() for epoch in expected for n_id in epoch], table.file, table.cache_rows)
    assert blocks[False] <= 1.01 * best < 0.9 * blocks[True]


@pytest.mark.medium
def test_what_was_sampled_for_other_mini_batches_is_not_used(folder, monkeypatch):
    loaders = [
        build(load_folder(folder), num_workers=1, **more).train_dataloader() for more in ({"memory": MEMORY}, {})
    ]
    for change in (lambda loader: None, lambda loader: setattr(loader.pipeline, "seed", 9)):
        for loader in loaders:
            change(loader)
        assert_same_batches(*loaders)
    disk, plain = loaders
    assert disk.lookahead._next_epoch_batches
    sampled = disk.lookahead._next_epoch_batches[0].restore()
    others = replace(sampled, task=replace(sampled.task, seeds=sampled.task.seeds.flip(0)))
    disk.lookahead._next_epoch_batches[0] = prefetching.CompactSampledBatch(others)
    real = MiniBatchPipeline.sample

    def failing(self, task):
        if task.epoch == 3:
            raise RuntimeError("no neighbours today")
        return real(self, task)

    monkeypatch.setattr(MiniBatchPipeline, "sample", failing)  # of the epoch after the next
    assert_same_batches(disk, plain)
    with pytest.raises(RuntimeError, match="no neighbours today"):
        next(iter(disk))


@pytest.mark.medium
def test_the_last_epoch_samples_no_other(folder, record_calls):
    drawn = record_calls(MiniBatchPipeline, "sample")
    train_state(load_folder(folder), memory=MEMORY)
    assert {task.epoch for _, task in drawn} == {0, 1}


@pytest.mark.medium
@pytest.mark.parametrize("workers", [0, 1])
def test_collective_batching_looks_ahead_as_others_do(folder, workers):
    data, read = load_folder(folder), {}
    for kind, options in (
        (NeighborDataModule, {}),
        (CollectiveDataModule, {}),
        (CollectiveDataModule, {"lookahead": 0}),
    ):
        module = build(data, kind, num_workers=workers, memory="6MB", store=folder / "x.npy", **options)
        loader = module.train_dataloader()
        table = replace_table(loader, 600)
        for _ in range(2):
            for batch in loader:
                assert torch.equal(batch.x, data.x[batch.n_id])
        assert table.claim(), "no loader announces reads"
        read[kind, len(options)] = table.counts.blocks
    assert read[NeighborDataModule, 0] == read[CollectiveDataModule, 0] < 0.95 * read[CollectiveDataModule, 1]


def test_a_mini_batch_that_is_made_again_is_sampled_again(folder):
    loader = build(load_folder(folder), CollectiveDataModule, num_workers=1, memory=MEMORY).train_dataloader()
    window = loader.lookahead.begin(loader.tasks(0), 0)
    tasks = [*loader.tasks(0)]
    for number in (1, 0, 1, 0, 2):  # out of order, as with two workers, and repeated, as after an out-of-memory error
        batch = window.prepare(number, tasks[number]).batch
        assert torch.equal(batch.n_id, loader.pipeline.sample(tasks[number]).nodes(None))
        assert torch.equal(batch.x, load_folder(folder).x[batch.n_id])
    assert window._first_unread == 3
    window.close()
    assert find_table(loader).claim()


def test_the_plan_says_what_the_memory_is_for(folder):
    module = build(load_folder(folder), memory=MEMORY)
    assert build(load_folder(folder)).disk_options("train") == {}
    assert module.disk_options("train")["tables"].keys() == {"x"}
    said = str(module.disk)
    assert said.startswith("features on disk (x.npy, 1.44 MB); of 4 MB of memory, ")
    assert "500 kB are for mini-batches sampled ahead" in said


def test_what_cannot_work_is_refused(folder, tmp_path):
    data = load_folder(folder)
    for options, said in (
        ({"memory": "20kB"}, "memory=20 kB is too small"),
        ({"memory": "much"}, "memory must be a number of bytes"),
        ({"memory": MEMORY, "lookahead": -1}, "lookahead"),
        ({"lookahead": 3}, "set memory= too"),
        ({"store": folder / "x.npy"}, "set memory= too"),
        ({"memory": MEMORY, "feature_dtype": "bfloat16"}, "feature_dtype converts features in memory"),
    ):
        with pytest.raises(ValueError, match=said):
            build(data, **options).train_dataloader()
    in_memory = load_folder(folder, mmap=False)
    with pytest.raises(ValueError, match=r"data\.x is not mapped from a file"):
        build(in_memory, memory=MEMORY)
    other = save_features(torch.ones(NODES, 3), tmp_path / "other.npy")
    with pytest.raises(ValueError, match="has 60 features and the file 3"):
        build(in_memory, memory=MEMORY, store=other)
    fewer = save_features(torch.ones(9, 60), tmp_path / "fewer.npy")
    with pytest.raises(ValueError, match=r"has 9 rows, but data has 6000 nodes"):
        build(in_memory, memory=MEMORY, store=fewer)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        build(in_memory, memory=MEMORY, store=write_whole(tmp_path / "gone", "").with_name("nothing.npy"))

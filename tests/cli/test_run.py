import csv
import os
import shutil

import numpy as np
import pytest
import torch
from filelock import FileLock
from hydra import compose, initialize_config_module
from torch_geometric.data import Data

from lightning_gnn.cli.assemble import build_data, build_task
from lightning_gnn.cli.splits import split_links
from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.datasets import save_hetero_folder
from lightning_gnn.datasets.folder import save_folder
from lightning_gnn.datasets.synthetic_hetero import planted_papers
from lightning_gnn.report.comparison import compare_runs, runs_of_sweep
from tests.cli.command import NODE, ROOT, TINY, fork, lgnn, load_weights, metrics_of, spawn

LINK = [
    *TINY, "task=link", "model.num_layers=2", "datamodule.num_neighbors=[4,4]", "datamodule.batch_size=256",
    "task.split.num_train=200", "task.split.num_val=50", "task.split.num_test=50", "trainer.max_epochs=2",
]  # fmt: skip

FULL = [item for item in TINY if not item.startswith("datamodule")]


@pytest.mark.slow
def test_what_a_run_leaves_and_says(tmp_path, capfd):
    assert lgnn(tmp_path) == 0
    out, err = capfd.readouterr()
    shown = "Test accuracy,Validation accuracy,Epoch time,Sampled edges/s,MTEPS,Sampling,Waiting,Largest part: "
    assert all(name in out for name in shown.split(","))
    assert err == ""
    metrics = metrics_of(tmp_path)
    assert 0 <= min(metrics["test_acc"], metrics["val_acc"]) <= max(metrics["test_acc"], metrics["val_acc"]) <= 1
    assert metrics["epochs"] == 2
    assert min(metrics["mteps"], metrics["sampled_edges_per_s"]) > 0
    assert metrics["advice"] in out
    assert set(metrics["time_split"]) == {"sampling_s", "features_s", "model_s", "wait_s", "other_s"}
    assert sum(metrics["time_split"][name] for name in ("model_s", "wait_s", "other_s")) == pytest.approx(
        metrics["epoch_time_s"], rel=0.2
    )
    for name in (".hydra/config.yaml", "logs/metrics.csv", "checkpoints/best.ckpt", "checkpoints/last.ckpt"):
        assert (tmp_path / name).is_file()
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    logged = (tmp_path / "logs/metrics.csv").read_text()
    assert "mteps" in logged
    assert "val_acc" in logged


@pytest.mark.slow
def test_learns_more_than_chance_and_equal_seeds_give_equal_runs(tmp_path):
    for name in ("one", "two"):
        assert lgnn(tmp_path / name, "trainer.max_epochs=6", "task.lr=0.01", "data.feature_noise=0.2", "seed=3") == 0
    assert metrics_of(tmp_path / "one")["test_acc"] > 0.7
    assert metrics_of(tmp_path / "one")["test_loss"] == metrics_of(tmp_path / "two")["test_loss"]


@pytest.mark.slow
def test_each_mini_batch_of_links_that_is_tested_has_both_kinds(tmp_path, capfd):
    with initialize_config_module("lightning_gnn.conf", version_base="1.3"):
        cfg = compose("train", overrides=[*LINK, "task.split.num_test=100", "datamodule.batch_size=10"])
    datamodule, _ = build_task(cfg, build_data(cfg))
    for loader in (datamodule.val_dataloader(), datamodule.test_dataloader()):
        labels = [batch.edge_label for batch in loader]
        assert {int(part.sum()) for part in labels} == {5}
    pairs = torch.cat([batch.n_id[batch.edge_label_index] for batch in loader], dim=1)
    *_, test = split_links(build_data(cfg), **cfg.task.split)
    assert {*zip(*pairs.tolist(), torch.cat(labels).tolist(), strict=True)} == {
        *zip(*test.edge_label_index.tolist(), test.edge_label.tolist(), strict=True)
    }  # the same edges with the same labels
    assert lgnn(tmp_path, "trainer.limit_test_batches=1", "datamodule.batch_size=20", base=LINK) == 0
    assert "Test AUC" in capfd.readouterr().out
    metrics = metrics_of(tmp_path)
    assert 0 < metrics["test_auc"] <= 1
    assert 0 <= metrics["val_auc"] <= 1
    assert metrics["task"] == "link"


def test_a_figure_that_is_not_there_to_monitor_is_one_line(tmp_path, capfd):
    stopping = "+callbacks.early={_target_:pytorch_lightning.callbacks.EarlyStopping,monitor:val_accuracy}"
    assert lgnn(tmp_path, stopping) == 2
    assert "error: Early stopping conditioned on metric `val_accuracy` which is not avail" in capfd.readouterr().err


@pytest.mark.slow
def test_a_folder_is_written_by_one_run_at_a_time(tmp_path, capfd):
    with FileLock(tmp_path / ".running", thread_local=False):
        assert lgnn(tmp_path, "trainer.max_epochs=1") == 2
    assert f"another run is writing to {tmp_path}: wait until it ends, or give hydra.run.dir" in capfd.readouterr().err
    assert not (tmp_path / "metrics.json").exists()
    for _ in range(2):  # two consecutive runs work
        assert lgnn(tmp_path, "trainer.max_epochs=1") == 0


TYPED = [
    "data=hetero_synthetic", "data.num_papers=600", "data.num_authors=300", "data.num_topics=40", "data.num_classes=3",
    "data.num_features=8", "data.split=[0.4,0.2,0.2]", "model.hidden_channels=16", "model.num_layers=2",
    "datamodule.num_neighbors=[4,4]", "datamodule.batch_size=64", "datamodule.num_workers=0", "trainer.max_epochs=3",
    "trainer.enable_progress_bar=false", "task.lr=0.02",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("model", ["rgcn", "hetero_sage"])
def test_a_folder_with_types_of_which_some_have_no_features_is_trained_and_evaluated(tmp_path, capfd, model):
    data = planted_papers(300, 90, 20, 3, 8, split=(0.4, 0.2, 0.2))
    for name in ("author", "topic"):
        data[name].num_nodes = data[name].num_nodes
        del data[name].x
    save_hetero_folder(data, tmp_path / "graph")
    base = ["data=custom", f"data.root={tmp_path}/graph", *(item for item in TYPED if not item.startswith("data"))]
    base += [item for item in TYPED if item.startswith("datamodule")] + [f"model={model}", "task.target=paper"]
    assert lgnn(tmp_path / "train", "task.embeddings=5", "trainer.gradient_clip_val=1", base=base) == 0
    assert metrics_of(tmp_path / "train")["test_acc"] > 0.5
    checkpoint = tmp_path / "train/checkpoints/best.ckpt"
    assert load_weights(checkpoint)["embeddings.tables.author.weight"].shape == (90, 5)
    for inference in ("sampled", "full"):
        given = ["mode=test", f"inference={inference}", f"ckpt_path={checkpoint}"]
        assert lgnn(tmp_path / inference, *given, base=[]) == 0
        assert metrics_of(tmp_path / inference)["test_acc"] > 0.5
    assert lgnn(tmp_path / "predict", "mode=predict", f"ckpt_path={checkpoint}", base=[]) == 0
    assert np.load(tmp_path / "predict/predictions.npy").shape == (300, 3)
    capfd.readouterr()
    assert lgnn(tmp_path / "none", "task.embeddings=null", base=base) == 2
    assert "no node features x of 'author', which the models need; task.embeddings=64 trains" in capfd.readouterr().err


def test_recommendation(tmp_path, capfd):
    base = [
        "task=recommend", "data.num_users=200", "data.num_items=80", "data.num_ratings=4000", "data.num_classes=4",
        "data.num_features=8", "model.hidden_channels=16", "model.num_layers=2", "datamodule.num_neighbors=[4,4]",
        "datamodule.batch_size=128", "datamodule.num_workers=0", "trainer.max_epochs=3", "task.lr=0.02",
        "datamodule.eval_loader_kwargs.neg_sampling.amount=20", "trainer.enable_progress_bar=false",
    ]  # fmt: skip
    assert lgnn(tmp_path, base=base) == 0
    metrics = metrics_of(tmp_path)
    # Random scores give a mean reciprocal rank of 0.17 among 21, and a hit rate of 0.48 among ten.
    assert metrics["test_mrr"] > 0.22
    assert metrics["test_hits@10"] > 0.55
    assert "Test MRR" in capfd.readouterr().out


def read_scores(directory, name):
    with (directory / "logs/metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "more", "score", "best", "shown", "width"),
    [
        ("multilabel", ["task.class_weights=[1,1.5,2]"], "f1", max, "Test F1 score", 3),
        ("regression", [], "mae", min, "Test mean absolute error", 1),  # the best checkpoint has the smallest error
    ],
)
def test_several_labels_and_numbers_per_node(tmp_path, capfd, task, more, score, best, shown, width):
    overrides = [f"task={task}", "data.feature_noise=0.1", "task.lr=0.03", "trainer.max_epochs=6", *more]
    assert lgnn(tmp_path, *overrides) == 0
    assert shown in capfd.readouterr().out
    metrics, scores = metrics_of(tmp_path), read_scores(tmp_path, f"val_{score}")
    assert metrics.get("test_f1", 1) > 0.8
    assert metrics.get("test_mae", 0) < 0.5 * scores[0]
    assert metrics[f"val_{score}"] == pytest.approx(best(scores))
    assert lgnn(tmp_path / "predict", "mode=predict", f"ckpt_path={tmp_path}/checkpoints/best.ckpt", base=[]) == 0
    assert np.load(tmp_path / "predict/predictions.npy").shape == (600, width)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "labels"), [("multilabel", "several"), ("regression", "numbers")])
def test_labels_and_numbers_of_a_type(tmp_path, task, labels):
    overrides = [f"task={task}", f"data.labels={labels}", "model=rgcn", "trainer.max_epochs=4"]
    assert lgnn(tmp_path, *overrides, base=TYPED) == 0
    metrics = metrics_of(tmp_path)
    assert metrics.get("test_f1", 1.0) > 0.5
    assert metrics.get("test_mae", 0.0) < 1.0


@pytest.mark.slow
def test_features_of_a_folder_may_stay_on_disk(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 100, generator=generator)
    data = Data(x=x, edge_index=torch.randint(3000, (2, 9000), generator=generator), y=(x[:, 0] > 0).long())
    for part, name in enumerate(("train", "val", "test")):
        data[f"{name}_mask"] = torch.arange(3000) % 9 == part
    save_folder(data, tmp_path / "arrays")
    losses = []
    for given in ([], ["datamodule.memory=8MB"]):
        base = ["data=custom", f"data.root={tmp_path / 'arrays'}", *(item for item in NODE if "data." not in item)]
        out = tmp_path / f"out{len(losses)}"
        assert lgnn(out, *given, "trainer.max_epochs=1", base=base) == 0
        losses.append(metrics_of(out)["test_loss"])
    assert len(set(losses)) == 1, losses


@pytest.mark.slow
def test_full_graph(tmp_path, capfd):
    overrides = ["datamodule=full", "model=gcn", "model.num_layers=2", "trainer.max_epochs=3"]
    assert lgnn(tmp_path, *overrides, base=FULL) == 0
    metrics = metrics_of(tmp_path)
    assert metrics["sampled_edges_per_s"] is None
    assert metrics["mteps"] == pytest.approx(4000 / metrics["epoch_time_s"] / 1e6, rel=0.01)
    out = capfd.readouterr().out
    assert all(name in out for name in ("Test accuracy", "MTEPS", "Epoch time"))
    assert "Sampled edges/s" not in out
    assert lgnn(tmp_path / "files", *overrides, "datamodule.compress=false", base=FULL) == 0
    plain = metrics_of(tmp_path / "files")
    assert plain["test_loss"] == pytest.approx(metrics["test_loss"], rel=1e-3)
    for compress, kind in (("true", CompressedGraph), ("false", torch.Tensor)):
        with initialize_config_module("lightning_gnn.conf", version_base="1.3"):
            cfg = compose("train", overrides=[*FULL, *overrides, f"datamodule.compress={compress}"])
        (batch,) = build_task(cfg, build_data(cfg))[0].train_dataloader()
        assert isinstance(batch.edge_index, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    ["model=gat", "logger=none", "callbacks=none", "trainer=fast_dev", "experiment=smoke", "trainer.precision=64-true"],
)
def test_choices(tmp_path, choice):
    assert lgnn(tmp_path, choice) == 0
    assert 0 <= metrics_of(tmp_path)["test_acc"] <= 1


@pytest.mark.slow
def test_exact_inference_from_a_checkpoint(tmp_path):
    assert lgnn(tmp_path / "train") == 0
    checkpoint = f"ckpt_path={tmp_path}/train/checkpoints/best.ckpt"
    exact = "datamodule.num_neighbors=[-1,-1]"
    streamed = ["inference=full", f"datamodule.inference.folder={tmp_path}/layers"]
    streamed.append("datamodule.inference.memory_limit=0")
    for mode in ("test", "predict"):
        for name, overrides in (("sampled", [exact]), ("full", ["inference=full"]), ("streamed", streamed)):
            assert lgnn(tmp_path / mode / name, f"mode={mode}", checkpoint, *overrides) == 0
    losses = {name: metrics_of(tmp_path / "test" / name)["test_loss"] for name in ("sampled", "full", "streamed")}
    assert losses["full"] == pytest.approx(losses["sampled"], rel=1e-5)
    assert losses["streamed"] == pytest.approx(losses["sampled"], rel=1e-5)
    rows = {name: np.load(tmp_path / "predict" / name / "predictions.npy") for name in losses}
    np.testing.assert_allclose(rows["full"], rows["sampled"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rows["streamed"], rows["sampled"], rtol=1e-4, atol=1e-5)
    assert list((tmp_path / "layers").glob("*.npy"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there(tmp_path, capfd):
    assert lgnn(tmp_path, "trainer=gpu") == 2
    assert "No supported gpu backend found!" in capfd.readouterr().err


@pytest.mark.slow
def test_sweep_compares_and_a_failed_job_does_not_hide_the_others(tmp_path, capfd):
    assert lgnn(tmp_path, "-m", "model=sage,gcn", "seed=1,2", "trainer.max_epochs=1") == 0
    assert "Comparison" in capfd.readouterr().out
    rows = list(csv.DictReader((tmp_path / "comparison.csv").open()))
    assert [(row["model"], row["seed"]) for row in rows] == [("sage", "1"), ("sage", "2"), ("gcn", "1"), ("gcn", "2")]
    for first, second in (rows[:2], rows[2:]):
        scores = [float(first["test_acc"]), float(second["test_acc"])]
        assert float(first["test_acc_mean"]) == pytest.approx(np.mean(scores))
        assert float(second["test_acc_std"]) == pytest.approx(np.std(scores, ddof=1))
    shutil.rmtree(tmp_path)
    assert lgnn(tmp_path, "-m", "model.dropout=2,0.1", "trainer.max_epochs=1") == 1
    shown = capfd.readouterr().out
    assert "failed" in shown
    assert "dropout is a probability" in shown
    assert [row["status"] for row in compare_runs(runs_of_sweep(tmp_path))] == ["failed", "ok"]


@pytest.mark.slow
def test_sweep_with_joblib(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    run = spawn("-m", *NODE, *launcher, f"hydra.sweep.dir={tmp_path}", "seed=1,2", "trainer.max_epochs=1")
    assert run.returncode == 0, run.stderr
    assert [row["status"] for row in compare_runs(runs_of_sweep(tmp_path))] == ["ok", "ok"]


@pytest.mark.slow
def test_sweep_with_optuna(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    searched = ["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.n_trials=3", "seed=1"]
    intervals = ["task.lr=tag(log,interval(0.001,0.1))", "model.dropout=interval(0.0,0.5)"]
    run = spawn("-m", *NODE, *searched, *intervals, f"hydra.sweep.dir={tmp_path}", "trainer.max_epochs=1")
    assert run.returncode == 0, run.stderr
    rows = compare_runs(runs_of_sweep(tmp_path))
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert len({row["task.lr"] for row in rows}) == 3
    assert all(0.001 <= float(row["task.lr"]) <= 0.1 for row in rows)
    assert (tmp_path / "report.html").is_file()


@pytest.mark.slow
def test_two_processes(tmp_path):
    run = spawn(*NODE, "strategy=ddp", "trainer.devices=2", f"hydra.run.dir={tmp_path}")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Test accuracy") == 1
    assert metrics_of(tmp_path)["mteps"] > 0


def test_relative_paths_are_of_the_directory_where_they_are_typed(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert lgnn(tmp_path / "out", "data=custom", "data.root=here", base=[]) == 2
    assert f"{tmp_path}/here" in capfd.readouterr().err.replace("\n", "")


RAW = ROOT.parent / "shared/data/planetoid"


@pytest.mark.slow
@pytest.mark.skipif(not RAW.is_dir(), reason=f"no Planetoid files at {RAW}")
@pytest.mark.parametrize(
    ("name", "given", "least"),
    [
        ("Cora", ["data=planetoid", "model=gcn", "datamodule=full", "trainer.max_epochs=60"], 0.75),
        # With rows scaled to sum 1, the weight decay of the wide settings keeps accuracy at chance, 17 %.
        ("CiteSeer", ["experiment=citeseer_gcn_tuned", "model.hidden_channels=64", "trainer.max_epochs=30"], 0.5),
    ],
)
def test_relative_root_and_published_settings(tmp_path, name, given, least):
    (tmp_path / "data" / name).mkdir(parents=True)
    (tmp_path / "data" / name / "raw").symlink_to(RAW / name / "raw")
    given = [*given, f"data.root={os.path.relpath(tmp_path / 'data', ROOT)}", f"hydra.run.dir={tmp_path}"]
    run = fork(*given, *["task.lr=0.005"] * (name == "CiteSeer"))
    assert run.returncode == 0, run.stderr
    assert metrics_of(tmp_path)["test_acc"] > least

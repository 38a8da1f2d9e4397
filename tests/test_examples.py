"""The examples run unchanged."""

import importlib
import re
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from tests.full_graph.launch import run_script
from tests.patience import PATIENCE
from tests.refusals import refuses

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.usefixtures("interruptible")  # notebook clients interrupt by SIGINT


def run_notebook(name):
    """Run a notebook; return printed text, final values of cells, and all outputs."""
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=PATIENCE, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    values = [output["data"]["text/plain"] for output in outputs if output.output_type == "execute_result"]
    return printed, values, outputs


@pytest.mark.slow
def test_the_notebook_runs_and_learns():
    printed, values, outputs = run_notebook("quickstart")
    assert float(re.search(r"test accuracy (\d\.\d+)", printed).group(1)) > 0.75
    assert "trainers: 0 (CPU)" in printed
    assert float(re.search(r"validation accuracy (\d\.\d+)", printed).group(1)) > 0.5
    assert "True" in values
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_the_notebook_about_loaders_measures_them():
    printed, values, outputs = run_notebook("choosing_a_loader")
    assert len(re.findall(r"s per epoch\. Largest part: \w+, \d+% of an epoch", printed)) == 4
    assert values[-1] == "True"  # the same weights with and without workers
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_the_notebook_about_full_graphs_evaluates_both_alike():
    printed, values, outputs = run_notebook("full_graph_or_mini_batches")
    found = re.findall(r"(\d+) steps, \S+ s, validation accuracy (\d\.\d+)", printed)
    assert [int(steps) for steps, _ in found] == [30, 40]
    assert all(float(accuracy) > 0.7 for _, accuracy in found)
    assert values[-1] == "True"
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_the_notebook_about_ascend_chips_counts_cycles():
    printed, _, outputs = run_notebook("neutron_ascend")
    assert "algorithm 1: M = 1" in printed
    assert float(re.search(r"largest error (\S+)", printed).group(1)) < 1e-2
    assert float(re.search(r"validation accuracy (\d\.\d+)", printed).group(1)) > 0.5
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


@pytest.mark.slow
def test_the_notebook_about_types_learns_and_sees_no_future():
    printed, _, _ = run_notebook("typed_and_temporal")
    assert float(re.search(r"test accuracy (\d\.\d+)", printed).group(1)) > 0.5
    assert float(re.search(r"mean reciprocal rank (\d\.\d+)", printed).group(1)) > 0.25
    seen, late = re.search(r"(\d+) edges, of which (\d+) are later", printed).groups()
    assert int(seen) > 1000
    assert late == "0"


@pytest.mark.slow
def test_the_notebook_about_one_launch_samples_as_the_launch_does():
    printed, values, outputs = run_notebook("pgsampler")
    assert values == ["True", "True"]  # the phases in plain Python, and the queue in any order
    fewest, most = re.search(r"tasks: (\d+) to (\d+)", printed).groups()
    assert int(fewest) < int(most)
    sources, targets = re.findall(r"(\d+) sources, (\d+) targets", printed)[-1]
    assert int(sources) > int(targets) == 3
    accuracies = re.findall(r"_hop: validation accuracy (\d\.\d+)", printed)
    assert len(accuracies) == 2
    assert all(float(accuracy) > 0.3 for accuracy in accuracies)
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_the_notebook_about_hybrid_training_moves_shares_there_and_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # of the decision log
    printed, _, outputs = run_notebook("hyscale")
    shares = re.search(r"share at the end of each epoch: (\d+)%, (\d+)%, (\d+)%", printed).groups()
    calm, disturbed, after = map(int, shares)
    assert disturbed < min(calm, after)
    assert "0: start: start with seeds cpu 0 + accelerator 128" in printed
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_the_notebook_about_plans_draws_both_schedules():
    printed, values, outputs = run_notebook("morphgl")
    assert len(re.findall(r"at most \d+\.\d% above any schedule", printed)) == 5
    assert all(float(accuracy) > 0.5 for accuracy in re.findall(r"test accuracy (\d\.\d+)", printed))
    assert "trained by the paper schedule" in printed
    assert values[-1] == "True"
    assert any("image/png" in output.get("data", {}) for output in outputs)


def run(name, *arguments):
    done = run_script(EXAMPLES / name, *arguments)
    assert done.returncode == 0, done.stderr
    return done


def train_own_module(system, ranks):
    done = run("own_module.py", system, "--num-nodes", "10000")
    accuracy = re.search(rf"{system}: {ranks} training, test accuracy (\d\.\d+)", done.stdout).group(1)
    assert float(accuracy) > 0.6
    return accuracy, done.stderr


@pytest.mark.slow
def test_an_own_module_trains_the_same_whoever_prepares_its_mini_batches():
    accuracy, _ = train_own_module("plain", ranks=1)
    for system, said in {
        "persistent": "No GPU for the persistent sampler",
        "collective": "No GPU for collective batching",
    }.items():
        found, stderr = train_own_module(system, ranks=1)
        assert found == accuracy
        if not torch.cuda.is_available():
            assert said in stderr


@pytest.mark.slow
@pytest.mark.parametrize("system", ["hyscale", "ascend_hybrid"])
def test_an_own_module_trains_on_two_processes(system):
    train_own_module(system, ranks=2)


@pytest.mark.slow
def test_requests_are_answered_as_the_whole_graph_does():
    pytest.importorskip("fastapi")
    done = run("serving.py", "--num-nodes", "3000", "--load-test", "40")
    assert float(re.search(r"differ from the whole graph's by at most (\S+)", done.stdout).group(1)) < 1e-5
    assert float(re.search(r"clients: (\d+) per second", done.stdout).group(1)) > 0


@pytest.mark.medium
@pytest.mark.parametrize("nodes", [[], [100], [-1], [0] * 2000])
def test_requests_that_cannot_be_answered_are_told_why(nodes, monkeypatch):
    fastapi = pytest.importorskip("fastapi")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    serving = importlib.import_module("serving")
    data = planted_power_law(100, 600, num_classes=3, num_features=4)
    model = NodeClassifier(GraphSAGE(4, 8, num_layers=2, out_channels=3), 3)
    app = serving.make_app(data, model)
    (endpoint,) = [route.endpoint for route in app.routes if route.path == "/predict"]
    assert len(endpoint(serving.Question(nodes=[5, 5]))["classes"]) == 2
    refuses(fastapi.HTTPException, r"ask for 1 to 1024 nodes|there is no node", endpoint, serving.Question(nodes=nodes))


@pytest.mark.slow
@pytest.mark.parametrize("script", ["gpu_sampling.py", "collective.py --gpu-route cpu"])
def test_both_ways_to_prepare_train_the_same(script):
    done = run(*script.split(), "--num-nodes", "10000")
    accuracies = re.findall(r"test accuracy (\d\.\d+)", done.stdout)
    assert len(accuracies) == 2
    if script.startswith("collective"):
        assert accuracies[0] == accuracies[1]
        assert re.search(r"this plan +\d", done.stdout)
    elif not torch.cuda.is_available():
        assert accuracies[0] == accuracies[1]
        assert "No GPU for the persistent sampler" in done.stderr
        assert "GPU sampler:" not in done.stdout
        assert "There is no GPU here: these times compare the CPU with itself." in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "score", "least"),
    [
        ("node_classification.py --epochs 6", r"test_acc\s*│?\s*(\d\.\d+)", 0.3),
        ("full_graph.py --num-nodes 5000 --epochs 20", r"racy (\S+)", 0.8),
        ("tables.py --customers 1500", r"(\d\.\d+)(?s:.*?)(\d\.\d+)", 0.05),
        ("minimal_system.py", r"test_acc\s*│\s*(\d\.\d+)", 0.4),
    ],
    ids=["mini-batches", "full graph", "tables", "minimal system"],
)
def test_a_script_learns(given, score, least):
    done = run(*given.split())
    accuracy, *constant = (float(found) for found in re.search(score, done.stdout).groups())
    assert accuracy > sum(constant) + least


@pytest.mark.slow
def test_the_cpu_and_what_stands_for_an_accelerator_share_the_work():
    done = run("hybrid.py", "--num-nodes", "20000", "--epochs", "3", "--batch-size", "128", "--cpu-share", "0.4")
    assert float(re.search(r"test accuracy (\d\.\d+)", done.stdout).group(1)) > 0.5
    assert "0: start: start with seeds cpu" in done.stdout
    epochs = re.findall(r"epoch \d: shares (.*), \S+ ms per iteration, (\S+) MTEPS", done.stdout)
    assert len(epochs) == 3
    for shares, mteps in epochs:
        assert 99 <= sum(int(share) for share in re.findall(r"(\d+)%", shares)) <= 101
        assert float(mteps) > 0

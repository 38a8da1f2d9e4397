"""Both packages of Lightning: which one is used, and what is said where the other one is met."""

import os
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest

HAS_LIGHTNING = "lightning" in packages_distributions()
pytestmark = [
    pytest.mark.medium,
    pytest.mark.skipif(not HAS_LIGHTNING, reason="the package lightning is not installed"),
]
PARTS = """
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import lightning_gnn.nn as nn
from lightning_gnn import FullGraphDataModule, HyScaleStrategy, NeighborDataModule


class Module({L}.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = GraphSAGE(8, 16, 2, 4)

    def training_step(self, batch, _):
        out = self.net(batch.x, batch.edge_index)[: batch.batch_size]
        return torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


data = Data(x=torch.randn(203, 8), y=torch.randint(4, (203,)), edge_index=torch.randint(203, (2, 1000)))
data.train_mask = torch.arange(203) < 64
data.val_mask = ~data.train_mask


def trainer(**kwargs):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return {L}.Trainer(accelerator="cpu", max_epochs=1, **quiet, **kwargs)


def datamodule():
    return NeighborDataModule(data, num_neighbors=[4, 4], batch_size=16)
"""
EVERY_FORM = """
ours = nn.NodeClassifier(nn.GraphSAGE(8, 16, 2, 4), num_classes=4)
for a_trainer, module, batches in (
    (trainer(), Module(), datamodule()),
    (trainer(), ours, datamodule()),
    (trainer(strategy="hyscale"), Module(), datamodule()),
    (trainer(strategy=HyScaleStrategy()), Module(), datamodule()),
    (trainer(strategy="ascend_hybrid"), ours, FullGraphDataModule(data)),
):
    before = [p.detach().clone() for p in module.parameters()]
    a_trainer.fit(module, batches)
    assert a_trainer.global_step == (1 if isinstance(batches, FullGraphDataModule) else 4), a_trainer.global_step
    assert any((a != b).any() for a, b in zip(before, module.parameters(), strict=True))
from lightning_gnn.runtime.lightning import PACKAGE
print(PACKAGE)
"""


def run(tmp_path, text, package=None):
    (tmp_path / "script.py").write_text(text)
    environment = {key: value for key, value in os.environ.items() if key != "LGNN_LIGHTNING"}
    environment |= {"LGNN_LIGHTNING": package} if package else {}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "script.py"], cwd=tmp_path, env=environment, text=True, capture_output=True
    )


@pytest.mark.parametrize(
    ("imports", "name", "package"),
    [
        ("import lightning as L", "L", "lightning.pytorch"),
        ("import lightning.pytorch as pl", "pl", "lightning.pytorch"),
        ("import pytorch_lightning as pl", "pl", "pytorch_lightning"),
        # PyG's DataModules import a package by themselves.
        ("import torch_geometric.data.lightning\nimport pytorch_lightning as pl", "pl", "pytorch_lightning"),
        ("import pytorch_lightning\ndel pytorch_lightning\nimport lightning as L", "L", "lightning.pytorch"),
    ],
)
def test_every_form_trains_with_the_package_of_the_script(tmp_path, imports, name, package):
    done = run(tmp_path, imports + PARTS.replace("{L}", name) + EVERY_FORM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == package


CHOSEN = "from lightning_gnn.runtime.lightning import PACKAGE\nprint(PACKAGE)\n"


def test_the_variable_decides_where_the_script_imports_neither(tmp_path):
    assert run(tmp_path, CHOSEN).stdout.split() == ["pytorch_lightning"]
    assert run(tmp_path, CHOSEN, "lightning").stdout.split() == ["lightning.pytorch"]
    absent = "import sys\nsys.modules['lightning'] = None\n" + CHOSEN
    assert (
        "LGNN_LIGHTNING=lightning is not installed: pip install lightning" in run(tmp_path, absent, "lightning").stderr
    )
    with_import = "import lightning as L\n" + CHOSEN
    assert run(tmp_path, with_import, "pytorch_lightning").stdout.split() == ["lightning.pytorch"]
    unknown = run(tmp_path, CHOSEN, "lightening")
    assert unknown.returncode == 1
    assert "LGNN_LIGHTNING=lightening is not a package of Lightning; use lightning or pytorch" in unknown.stderr


def test_an_imported_module_that_trains_decides_like_a_script(tmp_path):
    (tmp_path / "training.py").write_text("import lightning as L\n" + CHOSEN)
    assert run(tmp_path, "import pytorch_lightning\nimport training").stdout.split() == ["lightning.pytorch"]


@pytest.mark.parametrize(
    "use",
    ["datamodule()", "nn.NodeClassifier(nn.GraphSAGE(8, 16, 2, 4), num_classes=4)", "HyScaleStrategy()",
     "FullGraphDataModule(data)"],
)  # fmt: skip
def test_a_package_that_is_imported_too_late_is_named_with_its_cure(tmp_path, use):
    late = PARTS.replace("from lightning_gnn import", "from lightning_gnn import", 1).replace("{L}", "L")
    late = late.replace("\n\nclass Module", "\nimport lightning as L\n\nclass Module", 1)
    done = run(tmp_path, late + use)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("TypeError: this script uses lightning.pytorch, but lightning_gnn uses pytorch_lightning")
    assert "Write `import lightning as L` above the first `import lightning_gnn`" in last
    assert "LGNN_LIGHTNING=lightning in the environment" in last


def test_a_trainer_of_the_other_package_is_named(tmp_path):
    both = "import lightning as L\nimport pytorch_lightning as pl" + PARTS.replace("{L}", "pl")
    foreign = "L.Trainer(accelerator='cpu', logger=False).fit(L.LightningModule(), datamodule=datamodule())"
    done = run(tmp_path, both + foreign)
    assert done.returncode == 1
    assert "Trainer is a class of lightning.pytorch, but lightning_gnn uses pytorch_lightning" in done.stderr


def test_paths_of_classes_name_the_package_in_use():
    from lightning_gnn.runtime.lightning import FABRIC, PACKAGE, of_package

    for package in ("pytorch_lightning", "lightning.pytorch"):
        assert of_package(f"{package}.callbacks.EarlyStopping") == f"{PACKAGE}.callbacks.EarlyStopping"
    for fabric in ("lightning_fabric", "lightning.fabric"):
        assert of_package(f"{fabric}.plugins.TorchCheckpointIO") == f"{FABRIC}.plugins.TorchCheckpointIO"
    assert of_package("lightning_gnn.callbacks.Throughput") == "lightning_gnn.callbacks.Throughput"
    assert of_package("pytorch_lightning_of_mine.Trainer") == "pytorch_lightning_of_mine.Trainer"

"""Systems of other installed packages: found by the command, the doctor and the Trainer; a broken one is named."""

import sys
from importlib.metadata import EntryPoint

import pytest
import pytorch_lightning as pl
from pytorch_lightning.strategies import StrategyRegistry

from lightning_gnn import registration, systems
from lightning_gnn.cli import main as cli
from lightning_gnn.cli.commands import doctor
from tests.cli.command import TINY, lgnn, metrics_of, spawn
from tests.cli.test_startup import HEAVY, RUN_AND_LIST_PACKAGES, eval_last_line

WALKS = """
from lightning_gnn import NeighborDataModule
from lightning_gnn.systems import Plugin, System
from pytorch_lightning.strategies import SingleDeviceStrategy

SYSTEM = System(
    package="lgnn_walks", title="Walks", what="walks", use_when="always", devices=("mps_of_the_future", "cpu"),
    page="https://example.org/walks", datamodules=(Plugin(name="Walks", option="walks", what="x", use_when="x"),),
)

class Walks(NeighborDataModule):
    def __init__(self, data, *args, strict=False, **kwargs):
        if strict:
            raise ValueError("strict=True is not for this graph")
        super().__init__(data, *args, num_neighbors=[2, 2], **kwargs)

class Single(SingleDeviceStrategy):
    def __init__(self, device="cpu", level=0):
        super().__init__(device)
        self.level = level

    @classmethod
    def register_strategies(cls, strategy_registry):
        strategy_registry.register("walks_deep", cls, level=7)
"""
ENTRIES = """[lightning_gnn.systems]
walks = lgnn_walks:SYSTEM
[lightning_gnn.strategies]
walks = lgnn_walks:Single
walks_deep = lgnn_walks:Single
hyscale = lgnn_walks:Single
"""


def install(folder, name, code, entries, conf=None):
    """Write an installed distribution: a package and its metadata."""
    package, about = folder / name, folder / f"{name}-1.0.dist-info"
    package.mkdir()
    about.mkdir()
    (package / "__init__.py").write_text(code)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entries)
    if conf:
        (package / "conf" / "datamodule").mkdir(parents=True)
        (package / "conf" / "datamodule" / "walks.yaml").write_text(conf)


@pytest.fixture
def walks(tmp_path, monkeypatch):
    conf = "_target_: lgnn_walks.Walks\nbatch_size: 64\nnum_workers: 0\nstrict: false\n"
    install(tmp_path, "lgnn_walks", WALKS, ENTRIES, conf)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("lgnn_walks", None)


@pytest.fixture
def broken(tmp_path, monkeypatch):
    entries = (
        "[lightning_gnn.systems]\nbroken = lgnn_broken:SYSTEM\nabsent = lgnn_absent:SYSTEM\nlist = lgnn_list:ITEMS\n"
        "[lightning_gnn.strategies]\nbroken = lgnn_broken:Strategy\nlist = lgnn_list:ITEMS\n"
    )
    install(tmp_path, "lgnn_broken", "1 / 0", entries, "_target_: lgnn_broken.Walks\nbatch_size: 64\nnum_workers: 0\n")
    (tmp_path / "lgnn_list.py").write_text("ITEMS = []\n")
    monkeypatch.syspath_prepend(tmp_path)


RUN = [*TINY, "model.num_layers=2", "trainer.max_epochs=1", "datamodule=walks"]


def test_the_command_trains_tests_and_sweeps_with_its_configuration(walks, capsys):
    assert lgnn(walks / "run", base=RUN) == 0
    assert 0 <= metrics_of(walks / "run")["test_acc"] <= 1
    assert lgnn(walks / "test", f"ckpt_path={walks}/run/checkpoints/best.ckpt", "mode=test", base=[]) == 0
    assert metrics_of(walks / "test")["test_acc"] == metrics_of(walks / "run")["test_acc"]
    assert lgnn(walks / "sweep", "-m", "datamodule.batch_size=50,80", base=RUN) == 0
    assert len([*walks.glob("sweep/*/metrics.json")]) == 2
    assert lgnn(walks / "wrong", "datamodule.strict=true", base=RUN) == 2
    assert "error: datamodule: strict=True is not for this graph" in capsys.readouterr().err


def test_the_doctor_lists_it_with_its_devices_and_page(walks, capsys):
    assert doctor.main([]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "Walks" in line)
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells == [
        "Walks",
        "lgnn-walks: lgnn_walks:SYSTEM",
        "mps_of_the_future, cpu",
        "cpu",
        "https://example.org/walks",
    ]


@pytest.fixture
def registered(monkeypatch):
    """Register all strategies again, as a new process does."""
    monkeypatch.setattr(registration, "StrategyRegistry", registry := type(StrategyRegistry)())
    registration.register()
    return registry


def test_its_strategies_are_built_as_their_class_registers_them(walks, monkeypatch):
    monkeypatch.setattr(registration, "StrategyRegistry", registry := type(StrategyRegistry)())
    with pytest.warns(UserWarning, match="strategy 'hyscale' of lgnn-walks: lgnn_walks:Single is left out"):
        registration.register()
    assert "lgnn_walks" not in sys.modules
    assert (registry.get("walks").level, registry.get("walks_deep").level) == (0, 7)
    assert type(registry.get("hyscale")).__name__ == "HyScaleStrategy"
    monkeypatch.setitem(StrategyRegistry, "walks_deep", registry["walks_deep"])
    assert pl.Trainer(accelerator="cpu", strategy="walks_deep", logger=False).strategy.level == 7


def test_a_broken_one_is_named_and_does_no_harm(broken, capsys, tmp_path, registered):
    assert doctor.main([]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "broken: division by zero" in printed
    assert "No module named 'lgnn_absent'" in printed
    assert "lgnn_list:ITEMS is a list instead of a lightning_gnn.systems.System" in printed
    with pytest.raises(ImportError, match="lgnn-broken: lgnn_broken:Strategy cannot be imported: ZeroDivisionError"):
        registered.get("broken")
    with pytest.raises(ImportError, match="lgnn-broken: lgnn_list:ITEMS is not a subclass of"):
        registered.get("list")
    with pytest.warns(UserWarning, match="system 'absent' of lgnn-broken: lgnn_absent:SYSTEM is left out"):
        assert [name for name, _ in systems.find_configurations()] == ["broken"]
    assert lgnn(tmp_path / "run", base=RUN) == 2
    assert "error: datamodule: Error loading 'lgnn_broken.Walks': ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.slow
def test_a_new_process_starts_without_importing_it(walks):
    found = f"import sys; sys.path.insert(0, {str(walks)!r})\n"
    assert eval_last_line(found + RUN_AND_LIST_PACKAGES, "--help").isdisjoint(HEAVY | {"lgnn_walks"})
    code = "import pytorch_lightning as pl, lightning_gnn; "
    code += "print((pl.Trainer(strategy='walks_deep', accelerator='cpu', logger=False).strategy.level,))"
    assert eval_last_line(found + code) == (7,)
    shown = spawn(
        "datamodule=walks", "--cfg", "job", PYTHONPATH=f"{walks}:{cli.__file__.partition('/lightning_gnn/')[0]}"
    )
    assert "_target_: lgnn_walks.Walks" in shown.stdout


def test_the_classes_of_the_suite_register_the_names_that_are_declared():
    for system in systems.SYSTEMS:
        registry = type(StrategyRegistry)()
        for plugin in system.strategies:
            entry = EntryPoint(plugin.option, f"lightning_gnn.{system.package}:{plugin.name}", systems.STRATEGY_GROUP)
            systems.load(entry).register_strategies(registry)
        assert registry.available_strategies() == [
            name for plugin in system.strategies for name in (plugin.option, *plugin.variants)
        ]

"""The configuration files: every key has a comment, every choice composes, and the help matches."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import get_class, get_method
from omegaconf import OmegaConf

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted(CONF.rglob("*.yaml"))
GROUPS = sorted({path.name for path in CONF.iterdir() if path.is_dir()} - {"hydra", "recipe", "__pycache__"})
KEY = re.compile(r"^\s*(- )?(override |optional )?[\w/]+:(\s|$)")


def compose_config(*overrides):
    with initialize_config_module("lightning_gnn.conf", version_base="1.3"):
        return compose("train", overrides=["output_dir=out", *overrides])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_every_key_is_explained(path):
    lines = path.read_text().splitlines()
    assert any(line.startswith("#") and "@package" not in line for line in lines), "no comment on the file"
    text = False
    for number, line in enumerate(lines):
        if text and (line.startswith("  ") or not line):
            continue
        text = line.split("#")[0].rstrip().endswith(": |")
        above = lines[number - 1].strip().startswith("#") if number else False
        if KEY.match(line) and line.strip() != "defaults:":
            assert " # " in line or above, f"line {number + 1} has no comment: {line}"


CHOICES = [f"{group}={path.stem}" for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


@pytest.mark.campaign
@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes_and_names_things_that_exist(choice):
    folders = {"data=custom": "data.root=x", "datamodule=partitioned": "datamodule.root=x"}
    folders["datamodule=partitioned_link"] = "datamodule.root=x"
    cfg = compose_config(choice, *([folders[choice]] if choice in folders else []))
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    for name in ("data", "model", "datamodule", "task", "trainer"):
        target = cfg[name]._target_
        assert get_method(target) if name == "data" else get_class(target)
    for node in [*cfg.logger.values(), *cfg.callbacks.values()]:
        assert get_class(node._target_)


def test_every_recipe_is_for_a_combination_that_exists():
    for path in (CONF / "recipe").rglob("*.yaml"):
        task, data, last = path.stem.split("_")
        group = "model" if path.parent.name == "model" else "datamodule"
        cfg = compose_config(f"task={task}", f"data={data}", f"{group}={last}")
        recipe = OmegaConf.load(path)
        for name, node in recipe.items():
            for key, value in node.items():
                if not OmegaConf.is_dict(value):
                    assert cfg[name][key] == value, f"{path.stem}: {name}.{key}"


def test_the_command_line_wins_over_recipes_and_recipes_over_defaults_and_a_task_chooses_its_datamodule():
    choices = ["data=planetoid", "model=gcn", "datamodule=full"]
    cfg = compose_config(*choices)
    assert (cfg.model.hidden_channels, cfg.trainer.max_epochs) == (16, 200)
    assert compose_config(*choices, "model.hidden_channels=7").model.hidden_channels == 7
    assert compose_config("experiment=cora_gcn").model == cfg.model
    assert compose_config("task=link").datamodule._target_.endswith("LinkDataModule")
    assert compose_config("task=link", "datamodule=neighbor").datamodule._target_.endswith("NeighborDataModule")


def test_help_names_keys_and_groups_that_exist():
    template = "".join((CONF / f"hydra/help/{name}.yaml").read_text() for name in ("lgnn", "all"))
    cfg = compose_config("+data.root=x", "+hydra_run_dir=x")
    keys = re.findall(r"^    ([a-z_.]+)=", template, re.MULTILINE)
    assert len(keys) > 10
    for key in keys:
        if not key.startswith("hydra."):
            assert OmegaConf.select(cfg, key, throw_on_missing=False) is not None or key.split(".")[-1] in (
                "ckpt_path",
                "torch_threads",
                "every_n_train_steps",
            ), key
    for group, option in re.findall(r"\b(data|model|datamodule|task|trainer|experiment)=(\w+)", template):
        assert (CONF / group / f"{option}.yaml").is_file(), f"{group}={option}"

"""The documentation is correct: links resolve, options exist, commands compose, and its Python runs."""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import pytorch_lightning as pl
import torch
import torch_geometric.datasets
import yaml
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from pytorch_lightning.callbacks import ProgressBar
from torch.utils.data import DataLoader
from torch_geometric.data import HeteroData
from torch_geometric.loader import LinkLoader as PyGLinkLoader
from torch_geometric.loader import NodeLoader as PyGNodeLoader

import lightning_gnn
from lightning_gnn import NeighborDataModule
from lightning_gnn.cli.main import PRINTING
from lightning_gnn.datamodules.base import MiniBatchDataModule
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.planning.choice import AutoDataModule
from lightning_gnn.runtime.messages import keywords_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.relative_to(ROOT).as_posix(): path for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}
CONF = ROOT / "conf"
FENCE = re.compile(r"^(?P<before>[^\n]*)\n```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")

every_page = pytest.mark.parametrize("page", PAGES)


def find_blocks(page, language):
    """Return (line before the block, number of its first line, text) for each code block of a page."""
    text = "\n" + PAGES[page].read_text(encoding="utf-8")
    return [
        (found["before"], text[: found.start("code")].count("\n"), found["code"])
        for found in FENCE.finditer(text)
        if found["language"] == language
    ]


def strip_blocks(page):
    """Return a page without code blocks."""
    return FENCE.sub("", "\n" + PAGES[page].read_text(encoding="utf-8"))


def find_anchors(path):
    """Return the anchors of a page's headings as MkDocs generates them."""
    text = FENCE.sub("", "\n" + path.read_text(encoding="utf-8"))
    plain = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


@every_page
def test_links_lead_somewhere(page):
    here = PAGES[page]
    for target in LINK.findall(re.sub(r"`[^`\n]+`", "code", strip_blocks(page))):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        there = here if not name else (here.parent / name).resolve()
        assert there.is_file(), f"{target} leads nowhere"
        assert there.is_relative_to(ROOT), f"{target} leaves the repository"
        assert not anchor or anchor in find_anchors(there), f"{target}: no such heading"


@every_page
def test_files_that_are_named_exist(page):
    for name in re.findall(r"`([\w/]+/[\w]+\.(?:py|json|yaml|cpp|h|md))(?:::\w+)?`", strip_blocks(page)):
        assert any((top / name).exists() for top in (ROOT, ROOT / "lightning_gnn")), name
    for name in re.findall(r"\bbenchmarks\.([a-z][\w.]*\w)", PAGES[page].read_text(encoding="utf-8")):
        assert (ROOT / "benchmarks" / f"{name.replace('.', '/')}.py").exists(), f"benchmarks.{name} does not exist"
    for name in re.findall(r"`(test_\w+\.py)`", strip_blocks(page)):
        assert any((ROOT / "tests").rglob(name)), name


def test_every_page_has_its_place_in_the_site():
    def listed(entry):
        return [entry] if isinstance(entry, str) else [name for value in entry.values() for name in below(value)]

    def below(value):
        return [value] if isinstance(value, str) else [name for entry in value for name in listed(entry)]

    nav = below(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(nav) == sorted(page.removeprefix("docs/") for page in PAGES if page != "README.md")


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_tables_are_those_that_the_script_writes():
    for page, text in load_script("tables").pages().items():
        assert page.read_text(encoding="utf-8") == text, f"run python -m docs.tables for {page}"


def test_pictures_are_those_that_the_script_draws():
    charts = load_script("charts")
    assert {path.stem for path in charts.IMAGES.iterdir()} == {
        *charts.PICTURES,
        "results",
        "scaling",
        "hyscale-gains",
    }  # test_benchmarks checks these
    for name, draw in charts.PICTURES.items():
        assert (charts.IMAGES / f"{name}.svg").read_text(encoding="utf-8") == draw(), "run python docs/charts.py"


# -- options on pages


def list_options(kind):
    """Return the keywords of a class, including those that it passes on."""
    names = keywords_of(kind)
    if issubclass(kind, MiniBatchDataModule):
        for further in (lightning_gnn.NeighborSampler, PyGNodeLoader, PyGLinkLoader, DataLoader,
                        lightning_gnn.loading.NodeLoader):  # fmt: skip
            names |= keywords_of(further)
    return names


@every_page
def test_tables_of_options_name_options(page):
    kind = None
    for line in strip_blocks(page).splitlines():
        if found := re.match(r"\| option of `(\w+)`", line):
            kind = getattr(lightning_gnn, found[1])
        elif not line.startswith("|"):
            kind = None
        elif kind is not None and not line.startswith("|-"):
            for name in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                assert name in list_options(kind), f"{kind.__name__} has no option {name}"


# -- commands


def find_commands(page):
    """Return the ``lgnn`` commands of a page, split into words."""
    lines = [line for *_, code in find_blocks(page, "bash") for line in code.splitlines()]
    lines += re.findall(r"`(lgnn(?: [^`]+)?)`", strip_blocks(page).replace("\n", " "))
    found = (shlex.split(line.replace("…", "x"), comments=True) for line in lines if re.match(r"lgnn\b", line))
    return [words[1:] for words in found]


def list_flags(command):
    """Return the flags in the help of a command that has its own options."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        command.main(["--help"])
    return set(re.findall(r"(?<![\w-])--?\w[\w-]*", output.getvalue()))


ALL_COMMANDS = sorted({tuple(words) for page in PAGES for words in find_commands(page)})


@pytest.mark.slow  # a composition reads about twenty files
@pytest.mark.parametrize("part", range(4))
def test_commands_compose(part):
    with initialize_config_module("lightning_gnn.conf", version_base="1.3"):
        for words in ALL_COMMANDS[part::4]:
            try:
                check_command(list(words))
            except Exception as error:
                raise AssertionError(f"lgnn {shlex.join(words)}: {error}") from error


def check_command(words):
    """Compose a command with every group that it sweeps over, and check the arguments of its classes."""
    if words[:1] == ["-sc"]:  # completion, which tests/cli/test_help.py runs in bash
        assert words[1] in ("install=bash", "install=zsh", "install=fish")
        return
    if words and words[0] in PRINTING:
        module = importlib.import_module(f"lightning_gnn.cli.commands.{words[0]}")
        assert {word.partition("=")[0] for word in words if word.startswith("-")} <= list_flags(module)
        if words[0] != "export":
            return
        words = [word for word in words[1:] if not word.startswith("-")]
    if words[:1] == ["predict"]:
        words = ["mode=predict", *words[1:]]
    config = "plan" if words[:1] == ["plan"] else "train"
    flags = [word for word in words if word.startswith("-")]
    assert {*flags} <= {"-m", "--help", "--help-all", "--cfg", "--version"}
    words = [word for word in words[config == "plan" :] if word not in (*flags, "job")]
    parsed = OverridesParser.create().parse_overrides([word for word in words if not word.startswith("ckpt_path=")])
    if importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
        parsed = [item for item in parsed if not item.key_or_group.startswith(("hydra/sweeper", "hydra.sweeper"))]
    swept = {item.input_line: item for item in parsed if item.is_sweep_override()}
    assert bool(swept) == ("-m" in flags)
    values = {line: [f"{item.key_or_group}={value}" for value in list_values(item)] for line, item in swept.items()}
    first = {item.input_line: values.get(item.input_line, [item.input_line])[0] for item in parsed}
    others = [
        {**first, line: value}
        for line, item in swept.items()
        if (CONF / item.key_or_group).is_dir()
        for value in values[line][1:]
    ]
    for chosen in [first, *others]:
        launched = any(item.key_or_group.startswith("hydra") for item in parsed)
        cfg = compose(config, [*chosen.values(), "output_dir=out"], return_hydra_config=launched)
        for node in (cfg.data, cfg.model, cfg.datamodule, cfg.trainer, *cfg.callbacks.values()):
            target = get_object(node._target_)
            if target is AutoDataModule:
                target = NeighborDataModule  # the first that it may choose
            parameters = inspect.signature(target).parameters
            taken = list_options(target) if isinstance(target, type) else {*parameters}
            if node is cfg.model and any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
                continue  # passed on to its layers
            given = {key for key, value in node.items() if value is not None and not key.startswith("_")}
            assert given <= taken, f"{node._target_} takes no {given - taken}"


def list_values(item):
    """Return the values of a sweep, or one end of an interval."""
    return [item.value().start] if item.is_interval_sweep() else item.sweep_string_iterator()


# -- Python


@every_page
def test_python_names_what_exists(page):
    """Check imports and the keyword arguments of imported names, also in blocks that are not run."""
    known = {"pl": pl, "torch": torch}
    for before, line, code in find_blocks(page, "python"):
        assert not before.startswith("<!--") or NOT_RUN.fullmatch(before), before
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    module = importlib.import_module(alias.name)
                    known[alias.asname or alias.name.partition(".")[0]] = (
                        module if alias.asname else sys.modules[alias.name.partition(".")[0]]
                    )
            elif isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    known[alias.asname or alias.name] = getattr(module, alias.name)
        for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
            target = resolve_name(call.func, known)
            if not callable(target):
                continue
            names = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
            try:
                parameters = inspect.signature(target).parameters if names else {}
            except ValueError:  # a builtin without a signature
                continue
            if isinstance(target, type) and target.__module__.startswith("lightning_gnn"):
                taken = list_options(target) | keywords_of(target)
            elif any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
                continue
            else:
                taken = {*parameters}
            assert names <= taken, f"block at line {line}: {ast.unparse(call.func)} takes no {sorted(names - taken)}"


def resolve_name(node, known):
    """Return the object that a dotted name refers to; None if only running the code would show it."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := resolve_name(node.value, known)) is not None:
        return getattr(owner, node.attr, None) if inspect.ismodule(owner) or isinstance(owner, type) else None
    return None


class ShortTrainer(pl.Trainer):
    """Trains for two mini-batches without output."""

    def __init__(self, **kwargs):
        kwargs |= {"max_epochs": min(2, kwargs.get("max_epochs") or 1), "limit_train_batches": 2}
        kwargs["enable_model_summary"] = False
        kwargs["enable_progress_bar"] = any(isinstance(item, ProgressBar) for item in kwargs.get("callbacks") or ())
        super().__init__(**{"logger": False, **kwargs})


def make_namespace():
    """Return the names that code blocks may use: graphs, seeds, a model and a DataModule."""
    data = planted_power_law(400, 4000, num_features=8, split=(0.5, 0.2, 0.2))
    hetero = HeteroData()
    hetero["paper"].x, hetero["paper"].y = data.x, data.y
    hetero["paper"].train_mask = data.train_mask
    hetero["paper", "cites", "paper"].edge_index = data.edge_index
    hetero["user"].x, hetero["item"].x = torch.rand(50, 4), torch.rand(60, 5)
    edges = torch.stack([torch.arange(300) % 50, torch.arange(300) % 60])
    hetero["user", "rates", "item"].edge_index = edges
    hetero["item", "rev_rates", "user"].edge_index = edges.flip(0)
    model = NodeClassifier(GraphSAGE(8, 16, num_layers=2, out_channels=16), num_classes=16)
    datamodule = lightning_gnn.NeighborDataModule(data, num_neighbors=[4, 4], batch_size=64)
    return {"data": data, "hetero_data": hetero, "mask": data.train_mask, "edges": edges[:, :100], "model": model,
            "datamodule": datamodule, "pl": pl, "NeighborDataModule": lightning_gnn.NeighborDataModule}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES if find_blocks(page, "python")])
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pl, "Trainer", ShortTrainer)
    pl.seed_everything(0, verbose=False)
    names = {"__name__": "__main__", **make_namespace()}
    data = names["data"]
    monkeypatch.setattr(torch_geometric.datasets, "Reddit", lambda root: [data])
    if page.endswith("typed-and-temporal.md"):
        data.time, data.edge_weight = torch.arange(400), torch.rand(data.num_edges)
    for before, line, code in find_blocks(page, "python"):
        if not NOT_RUN.fullmatch(before):
            source = "\n" * line + code  # for the line numbers of the page in errors
            exec(compile(source, page, "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if "\n::: " in PAGES[page].read_text(encoding="utf-8")])
def test_the_reference_names_what_modules_define(page):
    """MkDocs reads sources, so it does not see names that only a module's ``__getattr__`` provides."""
    for name in re.findall(r"^::: ([\w.]+)$", PAGES[page].read_text(encoding="utf-8"), re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        source = inspect.getsource(importlib.import_module(module))
        nodes = list(ast.walk(ast.parse(source)))
        defined = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        defined |= {
            item.asname or item.name for node in nodes if isinstance(node, ast.ImportFrom) for item in node.names
        }
        defined |= {item.id for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign) for item in ast.walk(node)
                    if isinstance(item, ast.Name)}  # fmt: skip
        assert attribute in defined, f"{name} is not defined there"
    if page == "docs/reference/index.md":
        listed = re.findall(r"^::: lightning_gnn\.(\w+)$", PAGES[page].read_text(encoding="utf-8"), re.MULTILINE)
        assert sorted(listed) == sorted(lightning_gnn.__all__)


@pytest.mark.slow
def test_the_site_builds_and_needs_no_network(tmp_path):
    for name in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"{name} is not installed: pip install 'lightning-gnn[docs]'")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(PAGES) - 1
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)"', text)
        loaded += re.findall(r'<link\b[^>]*\brel="(?:stylesheet|preconnect|preload)"[^>]*', text)
        assert not [item for item in loaded if "//" in item], f"{page.name} loads something from elsewhere"
        for target in re.findall(r'<a\b[^>]*\bhref="([^"#?:]+)(?:#[^"]*)?"', text):
            missing = page.name != "404.html" and not (page.parent / unquote(target)).exists()
            assert not missing, f"{page.name}: {target} leads nowhere"
        assert "mermaid" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    reference = (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")
    for name in lightning_gnn.__all__:
        assert f'id="lightning_gnn.{name}"' in reference, f"{name} is not in the reference"
    assert ":class:" not in reference

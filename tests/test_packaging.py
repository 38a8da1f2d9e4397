"""The wheel installs one top-level package, and its command runs in any directory."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def test_every_extra_is_explained():
    lines = (ROOT / "docs/get-started.md").read_text(encoding="utf-8").splitlines()
    rows = " ".join(line.split("|")[1] for line in lines if line.startswith("| `"))
    extras = distribution("lightning-gnn").metadata.get_all("Provides-Extra")
    assert [extra for extra in extras if f"`{extra}`" not in rows] == []


@pytest.mark.medium
@pytest.mark.skipif(shutil.which("make") is None or find_spec("pip") is None, reason="needs make and pip")
@pytest.mark.parametrize(
    ("configured", "environment", "expected"),
    [
        ("", {}, []),
        ("no-index = true", {}, ["--no-index"]),
        ("no-index = false", {}, []),
        ("", {"PIP_NO_INDEX": "1"}, ["--no-index"]),
        ("no-index = true", {"PIP_NO_INDEX": "0"}, []),
        (
            "no-index = yes\nfind-links =\n    /wheels/a\n    /wheels/b",
            {"PIP_CONSTRAINT": "/pins.txt"},
            ["--constraint /pins.txt", "--find-links /wheels/a", "--find-links /wheels/b", "--no-index"],
        ),
    ],
)
def test_options_of_pip_for_uv(configured, environment, expected, tmp_path):
    (tmp_path / "makefile").write_text(f"include {ROOT}/Makefile\nprint:\n\t@$(PIP_OPTIONS)\n")
    (tmp_path / "pip.conf").write_text(f"[global]\n{configured}\n")
    # Without the configuration of this machine: pip looks for it below these folders.
    empty = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"), str(tmp_path / "none"))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        ["make", "-s", "-f", str(tmp_path / "makefile"), "print", f"PIP={sys.executable} -m pip"],
        env={**inherited, **empty, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    options = done.stdout.splitlines()
    # The configuration of the interpreter's folder and of /etc cannot be left out.
    assert [option for option in options if not option.startswith(("--index-url", "--extra-index-url"))] == expected


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = {".git", ".venv", "build", "dist"}
    for path in ROOT.iterdir():
        if path.name not in ignored and not path.name.endswith(".egg-info"):
            (source / path.name).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-r", str(path), str(source / path.name)], check=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)],
        check=True,
        capture_output=True,
    )
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_one_package_for_every_platform(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: true" in held.read(about).decode()
    assert not [name for name in names if name.endswith((".so", ".pyd", ".dll", ".dylib", ".a", ".o", ".pyc"))]
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"lightning_gnn"}
    for folder in ("lightning_gnn", "triton_kernels", "ascend_ops"):
        inside = "lightning_gnn" if folder == "lightning_gnn" else f"lightning_gnn/{folder}"
        modules = {f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
        assert modules <= set(names)
    project = ROOT / "lightning_gnn/cli/project"
    files = {path.relative_to(ROOT).as_posix() for path in project.rglob("*.*") if "__pycache__" not in path.parts}
    assert len(files) >= 4
    others = ("conf/train.yaml", "py.typed", "report/templates/base.html.j2", "ascend_ops/host/CMakeLists.txt")
    others = {
        f"lightning_gnn/{name}"
        for name in (*others, "ascend_ops/csrc/aggregate_cube.cpp", "ascend_ops/twin/include/kernel_operator.h")
    }
    assert files | others <= set(names)


@pytest.mark.medium
def test_an_installation_on_a_cpu_stays_below_one_and_a_half_gigabytes():
    if torch.version.cuda is not None:
        pytest.skip("a CUDA build of torch has several gigabytes of libraries")
    sizes, left = {}, ["lightning-gnn"]
    while left:
        found = distribution(left.pop())
        if found.name not in sizes:
            files = (Path(found.locate_file(file)) for file in found.files or ())
            sizes[found.name] = sum(file.stat().st_size for file in files if file.is_file())
            needs = map(Requirement, found.requires or ())
            left += [each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
    assert sizes["torch"] > 1e8
    assert sum(sizes.values()) < 1.5e9, sorted(sizes.items(), key=lambda item: -item[1])[:10]


@pytest.mark.slow
def test_the_command_runs_in_another_directory(wheel, tmp_path):
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    # Dependencies come from the test environment; only the wheel itself is installed.
    site = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, str(wheel)], check=True
    )
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    Path(site, "dependencies.pth").write_text("\n".join(dependencies))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    find = "import importlib.util; print(importlib.util.find_spec('lightning_gnn').origin)"
    located = subprocess.check_output([python, "-c", find], text=True, cwd=elsewhere, env=clean)
    assert located.startswith(site)
    subprocess.run(
        [python, "-m", "lightning_gnn", "data.num_nodes=2000", "data.num_edges=20000", "trainer.max_epochs=1",
         "hydra.run.dir=run"],
        check=True, cwd=elsewhere, env=clean, capture_output=True,
    )  # fmt: skip
    assert 0 <= json.loads((elsewhere / "run" / "metrics.json").read_text())["test_acc"] <= 1


@pytest.mark.slow
def test_everything_but_the_command_works_without_hydra():
    check = (
        "import importlib, sys; sys.modules['hydra'] = None; import lightning_gnn as package; "
        "[importlib.import_module(f'lightning_gnn.{name}') for name in (*package._NAMES, 'registration')]"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", check], check=True)

"""What was typed behind ``lgnn``, composed once before Hydra takes it, and mistakes as one line that helps."""

import argparse
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_module
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from pytorch_lightning.utilities import rank_zero_only

from lightning_gnn.cli.main import PRINTING
from lightning_gnn.cli.saved_run import Rebuilt, rebuild
from lightning_gnn.report.console import console, say
from lightning_gnn.runtime.messages import closest, removed

_CONF = "lightning_gnn.conf"
_PLUGINS = ("hydra/launcher/joblib", "hydra/sweeper/optuna")  # options that packages of the extra sweep bring
_USER_ERRORS = (
    ValueError,
    TypeError,
    RuntimeError,
    OSError,
    ImportError,
    InstantiationException,
    MisconfigurationException,
    OmegaConfBaseException,
)


class UserError(Exception):
    """Something the user can put right; shown as one line."""


@contextmanager
def explained(only_ours: bool = False) -> Iterator[None]:
    """Turn errors that a user can put right into a :class:`UserError`."""
    try:
        yield
    except _USER_ERRORS as error:
        if only_ours and not _is_ours(error):
            raise
        raise UserError(_in_one_line(error)) from error


def _is_ours(error: BaseException) -> bool:
    if isinstance(error, MisconfigurationException) or "loading state_dict" in str(error):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return True  # of a file or a disk, whoever wanted it
    frames = list(traceback.walk_tb(error.__traceback__))
    module = str(frames[-1][0].f_globals.get("__name__", ""))
    return module.startswith(("lightning_gnn", "pytorch_lightning.callbacks"))


def _in_one_line(error: BaseException) -> str:
    """Return one line: what was being built, and what is wrong."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        notes = getattr(error, "__notes__", [])
        error = error.__cause__
        error.__notes__ = notes  # type: ignore[attr-defined]
    text = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    text = re.sub(r"^\[Errno \d+\] ", "", text).replace(
        ", set env var HYDRA_FULL_ERROR=1 to see chained exception.", ""
    )
    if "loading state_dict" in text:
        text = f"the checkpoint does not fit the configured model: {text}"
    note = next(iter(getattr(error, "__notes__", [])), None)
    return text if note is None or text.startswith((f"{note}:", f"{note}.")) else f"{note}: {text}"


def start(job: Callable[[DictConfig], Any], config_name: str, interrupted: str) -> None:
    """Compose what was typed and run it, once or as a sweep.

    With ``ckpt_path`` the configuration that was saved with the checkpoint takes the place of the defaults.
    """
    try:
        with _errors_in_one_line():
            _start(job, config_name)
    except KeyboardInterrupt:
        say(interrupted, "yellow")
        raise SystemExit(128 + signal.SIGINT) from None


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if full_errors():
            raise
        say(f"error: {error}", "red")
        raise SystemExit(2) from None


def _start(job: Callable[[DictConfig], Any], config_name: str) -> None:
    argv = sys.argv
    deletions: list[str] = []

    @wraps(job)
    def begin(cfg: DictConfig) -> Any:
        sys.argv = argv  # what Lightning starts further processes with, which come by here themselves
        with _errors_in_one_line():  # before Hydra makes more lines of it
            return job(cfg)

    typed = _parse(argv[1:])
    if not typed.asks_hydra:
        rebuilt = _compose_once(config_name, typed)
        config_name, deletions = rebuilt.config_name, rebuilt.deletions
    try:
        if typed.overrides:  # argparse takes overrides that stand together
            flags = [item for item in argv[1:] if item not in typed.overrides]
            sys.argv = [argv[0], *flags, *deletions, *typed.overrides]
        hydra.main(version_base="1.3", config_path=f"pkg://{_CONF}", config_name=config_name)(begin)()
    finally:
        sys.argv = argv


def full_errors() -> bool:
    """Say whether the user wants tracebacks, in Hydra's way."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def check_writable(directory: str | Path, name: str) -> None:
    """Say why no files can be made in a directory, which need not exist yet."""
    there = Path(directory).absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        reason = f"{there} is a file" if there.is_file() else f"no folder can be made in {there}: {error.strerror}"
        raise ValueError(f"{name}={directory} cannot be used: {reason}; give another folder") from None


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Return overrides and flags, and as ``asks_hydra`` whether Hydra is asked for something of its own."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--run", "-r", action="store_true")
    parser.add_argument("--cfg", "-c")
    parser.add_argument("--package", "-p")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--info", "-i", nargs="?", const="all")
    typed, more = parser.parse_known_intermixed_args(arguments)
    own = more or typed.config_path or typed.config_name or typed.info
    typed.asks_hydra = bool(own or any(item.startswith("hydra.mode=") for item in typed.overrides))
    return typed


def _search_also(directory: str) -> None:
    """Let Hydra, which is initialized, find configurations in a directory too, as ``--config-dir`` does."""
    if not Path(directory).is_dir():
        raise ValueError(f"--config-dir {directory}: there is no such folder")
    path = GlobalHydra.instance().config_loader().get_search_path()
    place = SearchPathQuery(provider="schema")
    path.prepend(provider="command-line", path=f"file://{Path(directory).absolute()}", anchor=place)
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2("lgnn", path)


def _compose_once(config_name: str, typed: argparse.Namespace) -> Rebuilt:
    """Compose once, and see what stands in the way of a start; return what to compose then."""
    with initialize_config_module(_CONF, version_base="1.3"):
        try:
            if typed.config_dir is not None:
                _search_also(typed.config_dir)
            overrides = OverridesParser.create().parse_overrides(typed.overrides)
            rebuilt = rebuild(config_name, overrides)
            composed = [
                compose(rebuilt.config_name, overrides=[*choice, *rebuilt.deletions], return_hydra_config=True)
                for choice in _choices(overrides, typed.multirun)
            ]
            if typed.cfg is None:
                key = "hydra.sweep.dir" if typed.multirun else "hydra.run.dir"
                check_writable(OmegaConf.select(composed[0], key), key)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            if full_errors():
                raise
            raise UserError(_explain(error)) from None
    if rebuilt.note and typed.cfg is None:
        rank_zero_only(console().print)(rebuilt.note, soft_wrap=True, highlight=False, markup=False)
    return rebuilt


def _choices(overrides: list[Override], sweep: bool) -> Iterator[list[str]]:
    """Yield what a sweep composes to begin with, and then once with every other option of a group that it goes through.

    Of a single run, what was typed.
    """
    if not sweep:
        yield [str(item.input_line) for item in overrides]
        return
    groups = GlobalHydra.instance().config_loader().list_groups("")
    values: list[list[str]] = []
    for item in overrides:
        if not item.is_sweep_override():
            values.append([str(item.input_line)])
        elif item.is_choice_sweep() or item.is_range_sweep():
            values.append([f"{item.get_key_element()}={value}" for value in item.sweep_string_iterator()])
            if item.key_or_group not in groups:
                del values[-1][1:]
    yield [options[0] for options in values]
    for place, options in enumerate(values):
        for other in options[1:]:
            yield [other if i == place else first[0] for i, first in enumerate(values)]


def _explain(error: Exception) -> str:
    """Return one line: Hydra's own, and for what is gone or lies in another package what to do."""
    cause = error.__cause__
    text = re.sub(r"\s+", " ", str(error)).strip().partition(" See https:")[0]
    if isinstance(error, MissingConfigException):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if error.missing_cfg_file in _PLUGINS:
            return f"{group}={name} needs a package: pip install 'lightning-gnn[sweep]'"
        if (gone := removed(f"{group}={name}")) is not None:
            return gone
        if error.options:
            hint = closest(name, error.options, aside=True)
            return f"{group}={name} is unknown{hint}: there are {', '.join(error.options)}"
    if isinstance(error, OverrideParseException):
        if error.override in (*PRINTING, "plan", "predict"):
            return f"{error.override} is a command: put it first, lgnn {error.override}"
        return f"{error.override} cannot be read, as KEY=VALUE: {text}"
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and "is not in struct" in str(cause):
        return removed(str(cause.full_key)) or _explain_key(cause)
    if cause is not None and str(cause) not in text:
        text = f"{text}: {str(cause).splitlines()[0]}"
    return text


def _explain_key(error: OmegaConfBaseException) -> str:
    key, node = str(error.key), error.parent_node
    beside = [str(name) for name in node] if isinstance(node, DictConfig) and not node._is_none() else []
    hint = closest(key, beside) or f"; there are {', '.join(beside) or 'no keys'}"
    return f"{error.full_key} is unknown{hint}; +{error.full_key}=VALUE adds a key"

"""Compose the command line of ``lgnn`` before Hydra runs it, and report mistakes in one line."""

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType

import torch
from hydra import compose
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_gnn.cli.saved_run import Rebuilt, rebuild
from lightning_gnn.cli.search_path import initialize, run_application
from lightning_gnn.report.console import console, say
from lightning_gnn.runtime.files import DISK_ADVICE, check_writable, disk_full_cause, disk_full_error
from lightning_gnn.runtime.lightning import PACKAGE, MisconfigurationException, rank_zero_only
from lightning_gnn.runtime.memory_info import free_memory, out_of_memory_cause
from lightning_gnn.runtime.messages import shown
from lightning_gnn.runtime.urls import is_url, without_file_scheme
from lightning_gnn.systems import installed

_USER_ERRORS = (
    ValueError,
    TypeError,
    RuntimeError,
    MemoryError,
    OSError,
    ImportError,
    HydraException,
    MisconfigurationException,
    OmegaConfBaseException,
)


class UserError(Exception):
    """An error that the user can fix; shown as one line."""


@contextmanager
def raise_user_errors(only_ours: bool = False, memory_options: Sequence[str] = ()) -> Iterator[None]:
    """Convert errors that a user can fix to :class:`UserError`; ``only_ours``: only a system's or this package's.

    ``memory_options`` are settings that lower memory, with their effect, for an error about memory.
    """
    try:
        yield
    except _USER_ERRORS as error:
        if only_ours and not _is_ours(error):
            raise
        raise UserError(_in_one_line(error) + _explain_memory(error, memory_options)) from error


def _is_ours(error: BaseException) -> bool:
    if out_of_memory_cause(error) is not None:
        return True
    if isinstance(error, MisconfigurationException) or "loading state_dict" in str(error):
        return True
    if (isinstance(error, OSError) and error.errno is not None) or disk_full_cause(error) is not None:
        return True  # a file or disk error, whatever code raised it
    frames = list(traceback.walk_tb(error.__traceback__))
    module = str(frames[-1][0].f_globals.get("__name__", ""))
    others = {entry.module.partition(".")[0] for entry in installed()}
    return module.startswith(("lightning_gnn", f"{PACKAGE}.callbacks")) or module.partition(".")[0] in others


def _in_one_line(error: BaseException) -> str:
    """Format an error as one line: what was being built, and what is wrong."""
    notes = getattr(error, "__notes__", [])
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    if (full := disk_full_cause(error)) is not None:
        error = full if DISK_ADVICE in str(full) else _name_disks(full)
    text = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    text = re.sub(r"^\[Errno \d+\] |, set env var HYDRA_FULL_ERROR=1 to see chained exception\.", "", text)
    if isinstance(error, HydraException) and error.__cause__ is not None and str(error.__cause__) not in str(error):
        text = f"{text}: {str(error.__cause__).splitlines()[0]}"
    if isinstance(error, OverrideParseException) and error.override not in text:
        text = f"{error.override} cannot be parsed as KEY=VALUE: {text}"
    if "loading state_dict" in text:
        text = f"the checkpoint does not fit the configured model: {text}"
    note = next(iter(notes), None)
    return text if note is None or text.startswith((f"{note}:", f"{note}.")) else f"{note}: {text}"


def _explain_memory(error: BaseException, options: Sequence[str]) -> str:
    """Describe where memory ran out, what is free, and what lowers it; empty for another error."""
    cause = out_of_memory_cause(error)
    if cause is None and not isinstance(error, torch.OutOfMemoryError):
        return ""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, MemoryError) and str(error) and _is_of_package(frames[-1]):
        return ""  # it says what is needed and what is free
    calls = [frame.f_code.co_name for frame in frames if _is_of_package(frame)]
    where = f"out of memory in {calls[-1]}" if calls else "out of memory"
    free = "" if cause is None else f"; {free_memory()}"
    # While data is loaded, only its own settings matter.
    notes = getattr(error, "__notes__", [])
    chosen = [item for item in options if item.startswith("data.") == ("data" in notes)]
    return f" ({where}{free}){'; less memory is used with ' + ', or '.join(chosen) if chosen else ''}"


def _is_of_package(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith("lightning_gnn.") and not name.startswith("lightning_gnn.cli.")


def _name_disks(error: OSError) -> OSError:
    """Describe a full disk by the file, if the error names one, or else by the space on the disks in use."""
    path = error.filename2 or error.filename
    if isinstance(path, str) and Path(path).parent.is_dir():
        return disk_full_error(Path(path), error)
    folders = [Path.cwd(), Path(tempfile.gettempdir())]
    # Hydra keeps the configuration that --cfg or --help has shown, without a folder.
    if HydraConfig.initialized() and not OmegaConf.is_missing(HydraConfig.get().runtime, "output_dir"):
        folders.insert(0, Path(HydraConfig.get().runtime.output_dir))
    free = ", ".join(f"{shown(shutil.disk_usage(folder).free)} in {folder}" for folder in folders if folder.is_dir())
    return OSError(error.errno, f"a file cannot be written ({error.strerror}): {free} left; {DISK_ADVICE}")


def start(job: Callable[[DictConfig], object], config_name: str, interrupted: str) -> None:
    """Compose the command line and run ``job``, once or as a sweep.

    With ``ckpt_path`` the configuration saved in the checkpoint replaces the defaults.
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


def _start(job: Callable[[DictConfig], object], config_name: str) -> None:
    argv = sys.argv
    deletions: list[str] = []

    @wraps(job)
    def begin(cfg: DictConfig) -> object:
        sys.argv = argv  # Lightning launches the other ranks with it, and each composes it again
        with _errors_in_one_line():  # before Hydra prints several lines
            return job(cfg)

    typed, unknown = get_args_parser().parse_known_intermixed_args(argv[1:])
    if not (unknown or typed.config_path or typed.config_name or typed.info):
        rebuilt = _compose_once(config_name, typed)
        config_name, deletions = rebuilt.config_name, rebuilt.deletions
    try:
        if typed.overrides:  # argparse accepts overrides only next to each other
            flags = [item for item in argv[1:] if item not in typed.overrides]
            sys.argv = [argv[0], *flags, *deletions, *typed.overrides]
        run_application(begin, config_name)
    finally:
        sys.argv = argv


def full_errors() -> bool:
    """Return whether the user asked for tracebacks by Hydra's environment variable."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def absolute(path: str) -> str:
    """Return a path relative to the folder that the command was started in, or a URL, as an absolute path or URL."""
    return path if is_url(path := without_file_scheme(path)) else to_absolute_path(path)


def _compose_once(config_name: str, typed: argparse.Namespace) -> Rebuilt:
    """Rebuild the saved run, and compose a single run once to report mistakes in one line."""
    is_sweep = typed.multirun or any(item.startswith("hydra.mode=") for item in typed.overrides)
    searched = [] if typed.config_dir is None else [f"hydra.searchpath=[file://{Path(typed.config_dir).absolute()}]"]
    with raise_user_errors(), initialize():
        for item in typed.overrides:
            if item.startswith(("hydra.run.dir=", "hydra.sweep.dir=", "output_dir=")) and ":/" in item:
                raise ValueError(f"{item} must be a local path; callbacks.best.dirpath=URL keeps checkpoints at a URL")
        try:
            rebuilt = rebuild(config_name, OverridesParser.create().parse_overrides(typed.overrides))
            overrides = [*typed.overrides, *rebuilt.deletions, *searched]
            if is_sweep:  # each run is composed later, with its own choices
                overrides = [item for item in typed.overrides if item.startswith("hydra.sweep.")]
            cfg = compose(rebuilt.config_name, overrides=overrides, return_hydra_config=True)
            if typed.cfg is None:
                folder = "hydra.sweep.dir" if is_sweep else "hydra.run.dir"
                check_writable(OmegaConf.select(cfg, folder), folder)
        except HydraException as error:
            raise ValueError(_in_one_line(error)) from error
    if rebuilt.note and typed.cfg is None:
        rank_zero_only(console().print)(rebuilt.note, soft_wrap=True, highlight=False, markup=False)
    return rebuilt

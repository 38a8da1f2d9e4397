"""Parse ``NAME=VALUE`` settings of commands that do not use Hydra's configuration."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

T = TypeVar("T")


def read_settings(arguments: Sequence[str] | None, command: str, description: str, epilog: str) -> list[str]:
    """Return the ``NAME=VALUE`` arguments of a command, or print its help."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(command, description=description, epilog=epilog, formatter_class=form)
    parser.add_argument("settings", nargs="+", metavar="NAME=VALUE", help="see below")
    settings: list[str] = parser.parse_args(arguments).settings
    return settings


def parse_settings(cls: type[T], settings: Sequence[str], command: str) -> T:
    """Build an instance of a dataclass from settings; raise a ValueError for unknown or missing ones."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(cls), OmegaConf.from_dotlist(list(settings)))
        if missing := sorted(map(str, OmegaConf.missing_keys(merged))):
            raise ValueError(f"give {', '.join(f'{name}=' for name in missing)}; see {command} --help")
        instance = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"{str(error).splitlines()[0]}; see {command} --help") from None
    assert isinstance(instance, cls)
    return instance


def print_with_time() -> Callable[[str], None]:
    """Return a function that prints a message to stderr after the seconds since this call."""
    start, console = time.perf_counter(), Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    return lambda message: console.print(f"{time.perf_counter() - start:8.1f} s  {message}")


def gigabytes_in(folder: str) -> str:
    """Return the total size of the files below a folder, such as ``"1.2 GB"``."""
    return f"{sum(path.stat().st_size for path in Path(folder).rglob('*') if path.is_file()) / 1e9:.3g} GB"

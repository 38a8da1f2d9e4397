"""Files and folders at URLs (``s3://``, ``gs://``, …), fetched once per machine; ``file://`` URLs are local paths."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from fsspec.callbacks import Callback
from fsspec.core import url_to_fs
from tqdm import tqdm

from lightning_gnn.runtime.messages import shown
from lightning_gnn.runtime.store import checksum, kept_folder

_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "created")  # what file systems call the version of a file


class _Bytes(Callback):  # type: ignore[misc]
    """Counts the bytes of all files in one progress bar."""

    def __init__(self, bar: tqdm[Any], of_a_file: bool = False) -> None:
        super().__init__()
        self._bar, self._of_a_file = bar, of_a_file

    def branched(self, *paths: str, **_: Any) -> _Bytes:
        return _Bytes(self._bar, of_a_file=True)

    def relative_update(self, inc: int = 1) -> None:
        self._bar.update(inc * self._of_a_file)


def without_file_scheme(path: str | os.PathLike[str]) -> str:
    """Return a path or URL as text: a ``file://`` URL as its path, another URL with the slash that ``Path`` drops."""
    text = os.fspath(path)
    if text.startswith("file:/"):
        return text.removeprefix("file:").removeprefix("//")
    return re.sub(r"^(\w[\w+.-]+):/(?!/)", r"\1://", text)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL other than ``file://``."""
    return "://" in without_file_scheme(path)


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a local path, or that of a ``file://`` URL; raise a ValueError for another URL."""
    if is_url(path):
        raise ValueError(f"{without_file_scheme(path)} is a URL, but must be a local path: copy the files here")
    return Path(without_file_scheme(path))


def cached_path(path: str | os.PathLike[str]) -> Path:
    """Return a local path, or that of the cached copy of the file or folder at a URL.

    One process of a machine fetches the copy while others wait. It is fetched again if a file at the URL has changed.

    Raises:
        FileNotFoundError: Nothing is at the URL.
        ImportError: The file system of the URL needs a package that is missing, such as s3fs.
        RuntimeError: The URL cannot be read, or the copy cannot be written.
    """
    if not is_url(path):
        return local_path(path)
    url = without_file_scheme(path).rstrip("/")
    try:
        system, root = url_to_fs(url)
        system.invalidate_cache()
        files = {name: info for name, info in system.find(root, detail=True).items() if info["type"] == "file"}
    except ImportError as error:
        raise ImportError(f"{url} cannot be read: {error}") from None
    except Exception as error:  # each file system raises its own
        raise RuntimeError(f"{url} cannot be read: {error}") from error
    if not files:
        raise FileNotFoundError(f"{url} does not exist, or holds no files")
    copies = {name: Path(Path(root).name, name.removeprefix(root).lstrip("/")) for name in files}
    size = sum(info["size"] for info in files.values())

    def fetch(folder: Path) -> None:
        try:
            if any(".." in copy.parts for copy in copies.values()):
                raise ValueError("the name of a file contains '..'")
            pause = 0.1 if sys.stderr.isatty() else 30.0
            with tqdm(total=size, desc=url, unit="B", unit_scale=True, mininterval=pause) as bar:
                system.get([*files], [str(folder / copy) for copy in copies.values()], callback=_Bytes(bar))
            for name, copy in copies.items():
                if (found := (folder / copy).stat().st_size) != files[name]["size"]:
                    raise ValueError(f"{name} has {files[name]['size']} bytes, but {found} arrived")
        except Exception as error:
            raise RuntimeError(f"{url} ({shown(size)}) cannot be fetched: {error}") from error

    states = [
        (name, info["size"], *[str(info[key]) for key in _VERSIONS if key in info][:1])
        for name, info in sorted(files.items())
    ]
    return kept_folder("remote", checksum(url, states), fetch, url) / Path(root).name

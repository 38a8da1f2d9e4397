"""Errors that a user can put right, as one line instead of a traceback."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import InstantiationException
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.utilities.exceptions import MisconfigurationException

USER_ERRORS = (
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
    """Turn errors that a user can put right into a :class:`UserError`.

    Args:
        only_ours: Leave alone what was not raised by this package's checks or by Lightning's: it may be a bug, whose
            traceback is wanted.
    """
    try:
        yield
    except USER_ERRORS as error:
        if only_ours and not _is_ours(error):
            raise
        raise UserError(_explain(error)) from error


def _is_ours(error: BaseException) -> bool:
    if isinstance(error, MisconfigurationException) or "loading state_dict" in str(error):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return True  # of a file or a disk, whoever wanted it
    frames = list(traceback.walk_tb(error.__traceback__))
    return str(frames[-1][0].f_globals.get("__name__", "")).startswith("lightning_gnn")


def _explain(error: BaseException) -> str:
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

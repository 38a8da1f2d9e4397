"""Exceptions in runs of several ranks."""

from __future__ import annotations

import sys


def is_handling_exception() -> bool:
    """Whether an error is being handled, on this rank maybe alone: a collective that is called now may never end."""
    return isinstance(sys.exc_info()[1], Exception)

"""Exception handling in distributed runs."""

from __future__ import annotations

import sys


def is_handling_exception() -> bool:
    """Whether an exception is being handled, possibly on this rank only, so that a collective could hang."""
    return isinstance(sys.exc_info()[1], Exception)

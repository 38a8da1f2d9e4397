"""Scenarios of Trainer behavior that users rely on, runnable under any strategy.

They cover each hook that our strategies override and each hook that has ever shown a difference. Lightning itself
tests everything else. Importing this package registers all scenarios.
"""

from tests.hyscale.behaviour import (  # noqa: F401
    automatic,
    callbacks,
    checkpoints,
    evaluation,
    hooks,
    logs,
    loops,
    manual,
    schedules,
    state,
)
from tests.hyscale.behaviour.task import SCENARIOS

__all__ = ["SCENARIOS"]

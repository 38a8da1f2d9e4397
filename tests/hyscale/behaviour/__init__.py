"""What users of a Trainer rely on, as small scenarios that any strategy can run.

One or two of each hook that our strategies override, and each that has ever shown a difference; what only exercises
Lightning itself is tested there. Importing this package registers all scenarios.
"""

from tests.hyscale.behaviour import (  # noqa: F401
    automatic,
    by_hand,
    callbacks,
    checkpoints,
    evaluation,
    hooks,
    logs,
    loops,
    schedules,
    state,
)
from tests.hyscale.behaviour.task import SCENARIOS

__all__ = ["SCENARIOS"]

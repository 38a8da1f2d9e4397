"""What users of a Trainer rely on, as small scenarios that any strategy can run.

What they prove follows Lightning's own tests of optimisation, callbacks, logs and loops; the model is a graph network,
and the loaders are those of this package. Importing this package registers all scenarios.
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

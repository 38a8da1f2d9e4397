"""What the ranks need, imported before they are forked; see launch.py."""

import tests.conftest  # noqa: F401, I001  one torch thread, no talk from Lightning
import lightning_gnn
import lightning_gnn.ops.aggregate.numba
import lightning_gnn.strategies  # noqa: F401

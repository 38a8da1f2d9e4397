"""What the ranks need, imported before they are forked; see launch.py."""

import tests.conftest  # noqa: F401, I001  one torch thread, no talk from Lightning
import lightning_gnn
import lightning_gnn.full_graph.strategy
import lightning_gnn.hyscale.strategy
import lightning_gnn.ops.aggregate.numba  # noqa: F401

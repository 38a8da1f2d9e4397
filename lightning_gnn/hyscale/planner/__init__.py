"""One planner for a node: seeds, threads and preparation together (MorphGL, eq. 6; HyScale-GNN, eqs. 5 to 13)."""

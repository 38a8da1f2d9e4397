"""The performance model of HyScale-GNN (equations 5 to 13), and the measurements that calibrate it."""

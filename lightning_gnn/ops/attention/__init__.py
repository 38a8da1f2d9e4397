"""Attention, aggregation and update of a mini-batch's edges in one pass, for GAT, GATv2, RGAT and HGT."""

"""Fused attention, aggregation and update over the edges of a mini-batch, for GAT, GATv2, RGAT and HGT."""

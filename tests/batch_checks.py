"""What every mini-batch must satisfy, whichever loader made it."""

import torch


def check(batch, data):
    """The edges of a batch must be the graph's, and every attribute that of its own node or edge."""
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
    assert torch.equal(batch.x, data.x[batch.n_id])
    assert torch.equal(batch.y, data.y[batch.n_id])
    assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
    assert torch.equal(batch.edge_weight, data.edge_weight[batch.e_id])


def check_hops(batch, num_hops):
    """The counts per hop must add up to the batch."""
    assert sum(batch.num_sampled_nodes) == batch.num_nodes
    assert sum(batch.num_sampled_edges) == batch.num_edges
    assert len(batch.num_sampled_nodes) == num_hops + 1
    assert len(batch.num_sampled_edges) == num_hops

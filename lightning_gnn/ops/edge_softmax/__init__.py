"""The softmax over each node's incoming edges, and the attention-weighted sum that GAT layers need."""

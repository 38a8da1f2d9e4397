"""Attention weights of a whole graph: a softmax over the in-edges of every target."""

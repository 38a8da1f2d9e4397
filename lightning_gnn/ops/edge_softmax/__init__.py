"""Attention weights: a softmax over the in-edges of every target of a whole graph."""

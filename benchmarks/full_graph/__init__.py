"""Epochs on whole graphs, and the peers that they are set against."""

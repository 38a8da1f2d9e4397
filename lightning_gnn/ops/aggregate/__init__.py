"""Sums, means and maxima over the neighbors in a whole graph; read ``matrix``, ``reference``, ``definition`` first."""

"""Sum, mean and max aggregation over a whole graph; read ``matrix``, ``reference`` and ``definition`` first."""

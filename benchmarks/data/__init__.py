"""Where a graph lies: converted, on disk, in parts, on several machines, in memory that ranks share."""

"""The ground floor, which imports nothing of the package: cache, files, threads, clocks, ranks, resuming."""

"""The ground floor, which imports nothing of the package: messages, files and caches, threads, clocks, memory."""

"""Base layer, independent of the other packages: messages, files, caches, threads, clocks and memory."""

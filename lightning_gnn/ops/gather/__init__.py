"""Rows of a table by index, from host memory or a device cache: ``definition`` (with the CPU's backend), ``triton``."""

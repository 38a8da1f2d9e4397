"""Gathering rows of a table by index, from host memory or a device cache."""

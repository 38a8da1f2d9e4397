"""What is measured, or expected, of a GPU: ``make bench-gpu``."""

"""GPU benchmarks and roofline estimates: ``make bench-gpu``."""

"""The command ``lgnn``: compose, build, fit, report."""

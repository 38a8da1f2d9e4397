"""The commands of ``lgnn``, one file for each; ``train`` is the one without a name."""

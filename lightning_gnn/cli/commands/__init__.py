"""The commands of ``lgnn``, one module each; ``train`` is plain ``lgnn``."""

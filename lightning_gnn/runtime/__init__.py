"""The ground floor, which imports nothing of the package.

``files``, ``manifest`` and ``store`` (what is written and cached), ``pipeline`` (threads that prepare ahead),
``timeline`` (clocks, and when which stage ran), ``devices``, ``gradients`` and ``heartbeat`` (several ranks),
``checkpoint_io`` and ``resume``.
"""

"""The ground floor, which imports nothing of the package.

``messages`` (what users give and read), ``files``, ``manifest`` and ``store`` (what is written and cached),
``pipeline`` (threads that prepare ahead), ``timeline`` (clocks, and when which stage ran), ``devices``,
``shared_arrays`` and ``page_locked`` (memory), ``kernels`` (what numba compiles), ``checkpoint_io`` and ``resume``.
"""

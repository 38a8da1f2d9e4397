"""An emulator of compiled Triton kernels: the PTX for an H100 runs on the CPU, many threads at once, with weak memory.

To run kernels of a source tree, in a process without ``TRITON_INTERPRET``, with that tree and this one on the path
(``PYTHONPATH=TREE:``, where TREE has no tests/ptx of its own, copy this folder there)::

    from tests.ptx import driver
    driver.install()  # before the first launch; then launch kernels on CPU tensors as on a GPU
    driver.Settings.config.seed = 7  # of the scheduler; config.yield_, drain and stale are probabilities
    sampler = TritonNeighborSampler(indptr, indices, device="cpu", num_programs=4)
"""

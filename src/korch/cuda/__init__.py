"""All that depends on CUDA, but for the providers of kernels and the printer of Triton.

Here: the target, kernels and their launches, compilers and the driver. `measure/` times kernels, and `runtime/` builds,
stores and runs plans. Read `target.py`, then `kernel.py`.
"""

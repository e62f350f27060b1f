"""The parts that all providers of CUDA kernels share: the target, launches, the compiler and the driver."""

"""What CUDA kernels are, whoever makes them: the target, launches, the compiler, the driver."""

"""Plans for CUDA devices: they are built, stored in an artifact, and run as one CUDA graph."""

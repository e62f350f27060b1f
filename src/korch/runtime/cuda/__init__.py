"""Plans for CUDA devices: built, kept in an artifact, and run as one graph."""

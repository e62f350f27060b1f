"""The program that chooses kernels: data, text, formulation, relaxation, solver and verifier."""

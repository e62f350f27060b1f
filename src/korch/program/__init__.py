"""The binary linear program that chooses kernels: data, text form, formulation, relaxation, solver and verifier."""

"""The binary linear program that chooses kernels: instance -> cheapest plan with a certificate.

Read `problem.py` (data), `formulate.py` (the rows, each with its proof), `solve.py`, `verify.py`.
"""

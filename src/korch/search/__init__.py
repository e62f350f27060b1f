"""The search decides which candidates to measure, and stops when the plan is proven optimal or good enough.

Read `loop.py`, then `ledger.py`.
"""

"""Plans -> explanations, as text, page or trace; engines -> comparisons.

Read `explain.py`. `alternatives/` has other groupings and the savings of rules, `peers/` the engines.
"""

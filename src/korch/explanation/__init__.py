"""Explanations of a plan: baselines, savings by rule, counterfactual groupings."""

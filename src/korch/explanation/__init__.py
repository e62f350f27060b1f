"""What explains a plan: baselines, savings by rule, counterfactual groupings."""

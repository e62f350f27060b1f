"""The search: which candidates to measure, and when the plan is proven or good enough."""

"""A plan -> its alternatives: other groupings of its kernels, and the cost of plans without each rule."""

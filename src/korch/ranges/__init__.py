"""Ranges of sizes: primitive graphs of one model at several sizes -> one graph for all sizes up to the largest."""

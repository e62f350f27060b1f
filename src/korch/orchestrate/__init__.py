"""Candidates and costs -> plan."""

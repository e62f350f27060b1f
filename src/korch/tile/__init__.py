"""Candidate -> tile program -> source."""

"""Model files -> operator graph."""

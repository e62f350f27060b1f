"""Groups -> tile programs: one file per kind of schedule."""

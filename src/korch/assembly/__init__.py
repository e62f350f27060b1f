"""Plans of blocks in several layouts, and their assembly to a plan of the whole model."""

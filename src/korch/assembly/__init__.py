"""Searches plans for each block in several layouts, and combines them into a plan of the whole model."""

"""Writes the step's keys and values into the paged cache."""

"""Turns rows of logits into tokens."""

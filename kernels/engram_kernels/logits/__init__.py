"""Projection of hidden states to the vocabulary."""

"""Gated MLP of the experts chosen for each token."""

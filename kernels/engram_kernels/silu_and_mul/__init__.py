"""Gate of a gated MLP."""

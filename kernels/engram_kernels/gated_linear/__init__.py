"""Gate and up projections with their activation."""

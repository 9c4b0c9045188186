"""Copies recurrent states between slots."""

"""Unpacks a span of keys and values into a sequence's blocks."""

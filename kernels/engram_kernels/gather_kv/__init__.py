"""Packs a span of a sequence's keys and values into one contiguous tensor."""

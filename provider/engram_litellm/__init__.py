"""LiteLLM provider and snapshot client of Engram."""

"""Ops of Engram: one torch reference each, faster implementations behind the same registry."""

"""Kubernetes operator of Engram, and the local mode `engram up`."""

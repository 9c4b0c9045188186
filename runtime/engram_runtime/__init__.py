"""Stateful inference runtime: engine, snapshots, HTTP server and the `engram` command line."""

"""Snapshots of model state: what they are (policy), how they are stored (io), and the service that ties both."""

"""Brings a checkpoint to a folder: from a model hub or a bucket, checked, resumable, once per volume."""

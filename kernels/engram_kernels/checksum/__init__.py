"""A fast keyed digest of device memory: what a snapshot's bytes are checked with on their way through the GPU."""

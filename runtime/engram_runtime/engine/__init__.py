"""Host side of inference: requests in, step plans out; no tensor lives above the executor."""

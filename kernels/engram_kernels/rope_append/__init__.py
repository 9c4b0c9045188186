"""Per-head norm, rotary embedding and the append to the KV cache, in one pass over a step's queries, keys, values."""

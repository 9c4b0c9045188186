"""Reads Hugging Face checkpoints as they are left: config, tokenizer, and weights streamed shard by shard."""

"""Device side of inference: takes a step plan as plain data, owns the model, the caches and the sampled rows."""

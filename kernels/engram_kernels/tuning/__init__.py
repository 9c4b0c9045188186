"""Tuned launch parameters: plain JSON tables per GPU, looked up by op and a few words about the shape.

A table ships per GPU name (`nvidia_h200.json`); `default.json` serves every other one. Every entry of a shipped table
was run on that GPU and its output checked against a higher precision (tests/gpu), because a tile shape can be wrong on
the GPU and right in the interpreter. Lookups are cached: a launch costs one dictionary access.
"""

from engram_kernels.tuning.tables import load_table, parameters, tuned, tuned_or_none, use_folder

__all__ = ["load_table", "parameters", "tuned", "tuned_or_none", "use_folder"]

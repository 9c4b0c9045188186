"""The executor of a GPU: rows in device tables, decode steps as CUDA graphs, results one step late."""

"""Cache policy without torch: which block, which slot, which prefix; the executor alone touches the memory."""

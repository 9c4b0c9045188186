"""Short causal convolution with a carried window."""

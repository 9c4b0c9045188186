"""Matrix product with a weight stored as Hugging Face stores it."""

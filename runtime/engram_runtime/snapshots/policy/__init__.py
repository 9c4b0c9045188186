"""Identity, manifests, references and retention: pure decisions, no torch and no input or output."""

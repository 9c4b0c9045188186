"""What must go on while something breaks: an engine, a node, the operator, the API server, or all at once by number."""

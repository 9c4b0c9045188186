"""HTTP server: OpenAI-compatible calls, snapshot calls, health, metrics and the admin port."""

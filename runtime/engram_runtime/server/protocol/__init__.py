"""What travels over HTTP: requests parsed strictly into typed values, responses described for the OpenAPI document."""

"""Object storage that speaks S3. Importing this package imports no SDK; `store` does."""

"""Code of NPU backends that several operators share."""

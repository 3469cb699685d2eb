"""Code of Triton backends that several operators share."""

"""Code of CPU backends that several operators share."""

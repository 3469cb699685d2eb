"""DSA under context parallelism."""

"""Context parallelism: names of algorithms, rows of ranks, attention without DSA."""

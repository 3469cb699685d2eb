"""One name for each context parallel algorithm, whoever gave it."""

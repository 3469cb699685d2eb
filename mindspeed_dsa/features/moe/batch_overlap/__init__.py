"""The tokens of one microbatch in two halves: one is computed while the other travels."""

"""Parameters, gradients and optimizer state shared among data parallel ranks."""

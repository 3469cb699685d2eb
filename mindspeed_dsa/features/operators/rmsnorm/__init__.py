"""RMSNorm as one operator."""

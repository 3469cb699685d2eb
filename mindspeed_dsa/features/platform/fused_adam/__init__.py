"""Adam of torch's, whose step is one operator."""

"""SwiGLU as one operator."""

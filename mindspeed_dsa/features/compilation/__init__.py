"""Code that a compiler makes of parts of a layer."""

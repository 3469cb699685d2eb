"""Hot experts' weights travel to the tokens."""

"""Records of what a job computes; none of them changes it."""

"""Records of a job's results; none of them changes the training."""

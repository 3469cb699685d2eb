"""The real timeline of a step, recorded on every rank."""

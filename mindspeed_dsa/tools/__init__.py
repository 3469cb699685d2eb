"""Programs that a user runs beside training."""

"""Memory, communication and work of a layout, from a job's flags alone."""

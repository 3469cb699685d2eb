"""One job, run alternately as two sides, and their differences. Imports neither torch nor Megatron."""

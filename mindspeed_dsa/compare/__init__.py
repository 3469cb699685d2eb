"""One job, run as two sides in turn, and what differs between them. Imports neither torch nor Megatron."""

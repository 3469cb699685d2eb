"""The rotary key's gradient under tensor parallelism."""

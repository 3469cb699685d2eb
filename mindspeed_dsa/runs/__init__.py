"""Files of training runs that survive a kill: indexed text, metrics by step, checkpoint and run folders.

Nothing here imports torch or, but for indexing text, Megatron: launch scripts and notebooks can use it.
"""

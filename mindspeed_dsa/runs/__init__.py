"""Files of training runs that survive a kill: metrics by step, the load of experts and their placement.

Nothing here imports torch or Megatron: launch scripts and notebooks can use it.
"""

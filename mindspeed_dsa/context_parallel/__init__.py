"""How the ranks of a context parallel group share the rows of a sequence and its attention."""

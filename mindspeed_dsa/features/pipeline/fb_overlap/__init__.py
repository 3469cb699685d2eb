"""All-to-alls of one microbatch's forward under another's backward, and the other way round."""

"""A second stream for products that need not wait for their neighbours."""

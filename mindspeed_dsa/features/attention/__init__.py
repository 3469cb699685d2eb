"""Attention of all kinds but DSA: context parallelism, packed documents, sequence-tensor parallelism."""

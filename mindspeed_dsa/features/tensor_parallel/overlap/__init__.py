"""Tensor parallel communication hidden behind matmul."""

"""Triton kernels: the same bytes as `halfbyte.reference`, at memory speed. The two never import each other."""

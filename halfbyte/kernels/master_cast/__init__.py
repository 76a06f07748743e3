"""Casts of primary weights from pieces of their masters."""

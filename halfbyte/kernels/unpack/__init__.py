"""Stored operands as values, turned, and with their scales in another order."""

"""Operands from values: scales and codes, in one orientation or both."""

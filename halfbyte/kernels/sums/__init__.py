"""Sums of statistics: what a quantized operand lost, what a product lost, and outliers of columns."""

"""Products of quantized operands."""

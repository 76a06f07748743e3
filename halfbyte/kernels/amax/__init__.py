"""The largest finite magnitudes that operands are quantized with."""

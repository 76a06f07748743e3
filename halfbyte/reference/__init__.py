"""The specification in plain torch: what every other backend must reproduce byte for byte, on any device.

It says what docs/numerics.md says, in whole-tensor operations, and shares nothing with `halfbyte.kernels`.
"""

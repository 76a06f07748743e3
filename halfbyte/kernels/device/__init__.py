"""Device functions: what kernels are made of."""

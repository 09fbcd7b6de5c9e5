"""Device functions (`@triton.jit`) that several kernels share."""

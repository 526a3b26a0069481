"""Triton kernels, installed as `geoflow_fast.kernels`; imported only when a CUDA tensor or a test asks for them."""

"""Trays without the hardware, over the fake NVML of `vime_cuda.testing`."""

"""Machines without the hardware: a fake NVML beneath the real `pynvml`, and profiles of machines for it."""

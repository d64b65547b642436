"""Machines of this platform without the hardware: a fake `npu-smi` and the profiles that it answers from."""

"""vime on NVIDIA GPUs: A100, H100, H200, B200."""

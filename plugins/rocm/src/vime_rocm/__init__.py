"""vime on AMD Instinct GPUs: MI300X, MI325X, MI355X."""

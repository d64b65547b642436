"""vime on NVIDIA GB200 and GB300 racks."""

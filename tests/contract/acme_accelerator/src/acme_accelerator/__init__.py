"""vime on ACME devices, which exist on paper only."""

"""A machine with AMD Instinct GPUs where there is none: a fake amdsmi and machines for the conformance kit."""

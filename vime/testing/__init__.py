"""Public helpers for tests: roles in memory, tiny models, the conformance kit."""

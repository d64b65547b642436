"""Graders, one per file, and the processes that run them."""

"""Frozen, picklable, torch-free values that describe hardware and software. Every hook answers with one of these."""

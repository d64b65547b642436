"""Prompts: reading, rendering, making; the buffer and its journal; the schedule of a step."""

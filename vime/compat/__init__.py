"""The world of slime: its flags and its custom functions."""

"""Losses and advantages as pure tensor functions, one algorithm a file."""

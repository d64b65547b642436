"""Measurements behind `vime bench`. Every figure is a ratio to a floor measured in the same run."""

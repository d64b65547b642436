"""Platforms: discovery of plugins, one lineage of hooks per platform, and the optional answers that all share."""

"""The host as a platform: a plugin like any other, reached through its entry point."""

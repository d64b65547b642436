"""One file per way in which weights travel, each with a trainer's and an engine's half."""

"""Bringing the trainer's weights to the engines: transports, the publish protocol, the engine's half and its gate."""

"""Sampling: engine servers, the router in front of them, the client, and what rollouts are made of."""

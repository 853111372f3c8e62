"""Slots in which a client finds the outputs of its request."""

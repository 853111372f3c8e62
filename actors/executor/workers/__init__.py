"""Processes that run a model: their start, their main loop, and the frames that they exchange with the engine."""

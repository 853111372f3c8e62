"""Faces of the engine: Python APIs and the command line."""

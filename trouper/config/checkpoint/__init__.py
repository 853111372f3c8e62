"""Read a model folder's configuration, from its JSON files and GGUF headers only: never from code."""

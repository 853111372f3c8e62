"""Read a model folder's configuration, only from its JSON files and GGUF headers, never from code."""

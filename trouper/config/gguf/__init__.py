"""GGUF files: their headers, and the config.json and tensor names that a header stands for."""

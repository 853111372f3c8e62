"""GGUF files: their headers, and the config.json and tensor names that correspond to a header."""

"""Studies of adapters, draft models, quantization, memory and models computed by transformers."""

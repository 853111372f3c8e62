"""Commands that run many prompts or requests through one engine: `generate`, `embed`, `score`, `run-batch`."""

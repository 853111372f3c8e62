"""State that a device keeps between steps, and the batch that it gathers for the next step."""

"""Parity with transformers: tiny random models, driven plan by plan through `Runner.step`."""

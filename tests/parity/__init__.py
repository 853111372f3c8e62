"""Parity with transformers: tiny random models, driven plan by plan through `CpuRunner.step`."""

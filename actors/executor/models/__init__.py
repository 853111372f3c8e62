"""Model code: one decoder described by traits, and the registry of known architectures."""

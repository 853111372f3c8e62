"""Plain torch versions that define what the kernels compute."""

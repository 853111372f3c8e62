"""Build, compile, launch and record CPU kernels."""

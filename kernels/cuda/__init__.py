"""The Triton kernels: one operation per file.  Imported by nothing that runs without a GPU."""

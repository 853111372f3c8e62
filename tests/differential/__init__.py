"""Two servers on one model get the same requests, and their answers are compared: `python -m tests.differential`."""

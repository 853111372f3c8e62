"""The server: in memory, and as a process that real clients talk to."""

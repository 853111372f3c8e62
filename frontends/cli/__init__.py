"""The command line.  Each command parses, calls one public function, prints, and sets the exit code."""

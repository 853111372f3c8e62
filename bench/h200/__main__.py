"""Run `python -m trouper.bench.h200`: see `run.py`."""

from trouper.bench.h200.run import main

main()

"""Run `python -m trouper.bench.h200`; the code is in `run.py`."""

from trouper.bench.h200.run import main

main()

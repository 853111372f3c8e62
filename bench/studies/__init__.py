"""One-off measurements behind decisions in docs/log.  They need a checkout: `python -m trouper.bench.studies.GROUP.NAME`."""

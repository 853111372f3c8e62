"""The programs built on the application: `trouper serve` and `trouper run-batch`."""

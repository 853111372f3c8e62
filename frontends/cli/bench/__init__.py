"""`trouper bench`: one file per command.  What is measured is in `trouper.bench`."""

"""The commands of `trouper bench`."""

"""`trouper chat` and `trouper complete`: sessions at a terminal, with a local engine or a server."""

"""Clients of other projects against `trouper serve`: one script each, `python SCRIPT URL [URL_OF_A_POOLING_MODEL]`."""

"""Test `trouper serve` with other projects' clients: one script for each, `python SCRIPT URL [URL_OF_A_POOLING_MODEL]`."""

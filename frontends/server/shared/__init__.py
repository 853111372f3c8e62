"""Vocabulary of the server: errors, settings, the table of known fields, and token counts."""

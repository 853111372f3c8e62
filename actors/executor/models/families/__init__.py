"""Readers of config files: one for each family of models, and the tables that find them."""

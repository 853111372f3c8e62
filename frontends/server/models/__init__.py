"""Several models in one server: which of them are in memory."""

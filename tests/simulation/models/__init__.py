"""Several models in one server, in virtual time."""

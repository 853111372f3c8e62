"""The devices behind the executor: a thread, a simulation."""

"""HTTP without a model: requests, bodies, listeners."""

"""Routes for operators: control, health, metrics, and the description of the API."""

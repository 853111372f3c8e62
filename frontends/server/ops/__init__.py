"""Control, operations and the API's description."""

"""The pooling routes."""

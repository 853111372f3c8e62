"""The Responses API: conversations of typed items, and the memory that keeps them."""

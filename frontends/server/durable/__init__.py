"""Keep what must outlive the server: a journal of requests and sampled tokens."""

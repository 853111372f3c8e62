"""The state of one replica: open sequences, their queues and KV blocks, and the plans in flight."""

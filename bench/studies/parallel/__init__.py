"""Studies of worker processes, pipeline stages, tensor-parallel ranks and replicas."""

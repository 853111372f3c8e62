"""Share options among tests of several workers, and a launcher that records the workers it starts."""

from trouper.actors.executor.workers.launching import launch

OPTIONS = {
    "dtype": "float32",
    "max_num_batched_tokens": 32,
    "max_num_seqs": 16,
    "max_model_len": 512,
}


class LocalWorkers:
    """Start workers and record them."""

    def __init__(self, module):
        self.peers = []
        self._module = module

    def __call__(self, rank, *, files=()):
        self.peers.append(launch(rank, self._module, files=files))
        return self.peers[-1]

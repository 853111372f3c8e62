"""What is drawn for a world of machines: where workers are, what clients ask, and which faults come when."""

import random
from typing import NamedTuple

VOCABULARY = 97
FAULTS_S = 90.0  # in which they begin and end
KINDS = (
    "cut", "cut", "off", "host killed", "host stopped", "slow", "worker killed", "twin", "wrong key",
    "silent", "garbage", "impostor", "nonsense",
)  # fmt: skip


class MachineFault(NamedTuple):
    kind: str
    node: int
    at_s: float
    lasts_s: float


class HostsScenario:
    """Some machines, replicas on them, requests and faults."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.seed = seed
        self.num_hosts = dice.choice((1, 2, 2, 3))
        self.num_replicas = dice.choice((1, 2))
        self.step_s = dice.choice((0.1, 0.5, 2.0))
        self.layouts = [self._layout() for _ in range(self.num_replicas)]
        self.requests = [
            (dice.uniform(0, FAULTS_S), [dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 9))])
            for _ in range(dice.randint(1, 8))
        ]  # fmt: skip
        self.num_tokens = dice.choice((3, 10, 30))
        faults = [self._fault() for _ in range(dice.choice((1, 1, 2, 3, 5)))]
        self.faults = sorted(faults, key=lambda fault: fault.at_s)

    def _layout(self) -> dict[int, tuple[int, ...]]:
        """Which machine has which of a replica's workers."""
        nodes = list(range(1, self.num_hosts + 1))
        first = self.dice.choice(nodes)
        if self.dice.random() < 0.5 or self.num_hosts == 1:
            return {first: self.dice.choice(((0,), (0, 1)))}
        return {first: (0,), self.dice.choice([n for n in nodes if n != first]): (1,)}

    def _fault(self) -> MachineFault:
        dice = self.dice
        at_s = dice.uniform(0, FAULTS_S)
        lasts_s = dice.choice((0.5, 3.0, 12.0, 40.0))
        node = dice.randint(1, self.num_hosts)
        return MachineFault(dice.choice(KINDS), node, at_s, min(lasts_s, FAULTS_S - at_s))

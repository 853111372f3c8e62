"""What must hold of an engine whose device may be lost, beside what `oracles.py` says of every engine."""

import math
import os
from typing import Any

from tests.simulation import oracles
from tests.simulation.oracles import (
    check_case,
    check_delay,
    check_finite,
    check_idle,
    check_refusal,
    require,
)
from trouper.actors.engine.lifecycle import MEMORY
from trouper.errors import GenerationError

__all__ = [
    "at_rest", "check_case", "check_delay", "check_end", "check_error", "check_failed_start",
    "check_faults", "check_finite", "check_idle", "check_loss", "check_refusal",
]  # fmt: skip


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def at_rest(world: Any) -> None:
    device = world.device
    oracles.at_rest(world)
    calls = device._calls._open
    if not device.is_up:
        require(not calls, "a call is left open", calls)
    elif not calls:
        want = MEMORY - world.engine.lifecycle.resident
        for peer in device.launcher.peers[-1].worker_group:
            absent = peer.model.absent
            require(absent == want or peer.is_dead, "another sleep", absent, want)


def check_loss(peer: Any) -> None:
    """A loss is told when the worker has been reaped, and all that it had answered was handed out."""
    for each in peer.worker_group:
        require(each.is_ended, "a loss before the worker was reaped", each)
    require(peer.num_handed_out <= peer.num_answers, "an answer too many", peer)
    if not (peer.was_killed or peer.is_misbehaving):
        num_whole = peer.num_answers + sum(piece.answers is not None for piece in peer.readable())
        require(peer.num_handed_out == num_whole, "answers were thrown away", peer)


def check_failed_start(world: Any, error: Exception) -> None:
    peers = world.device.launcher.peers
    is_ended = all(peer.is_ended for peer in peers)
    is_fated = any(peer.fate.end in ("byte", "time") for peer in peers)
    require(is_ended and is_fated, "a start failed", peers, error)


def check_error(world: Any, case: Any, error: Exception) -> None:
    """A request is condemned if it was alone in the step of a loss, and in the step of one before.

    So it is if its grammar was prepared at two losses, the second time alone.
    """
    is_condemned = isinstance(error, GenerationError) and error.code == "poisoned_request"
    if not is_condemned:
        oracles.check_error(world, case, error)
        return
    by_grammar = world.suspect_grammars.get(case.client.wish.grammar, [])
    if any(by_grammar[1:]):
        return
    alone = [i for i, clients in enumerate(world.suspects) if clients == {case.index}]
    shared = [i for i, clients in enumerate(world.suspects) if case.index in clients]
    require(bool(alone) and alone[-1] > shared[0], "condemned in company", case, world.suspects)


def check_faults(world: Any, case: Any) -> None:
    oracles.check_faults(world, case)
    if case.index in world.killers and case.is_finished and not case.was_aborted:
        after = world.killers[case.index]
        num_tokens = max(len(completion.token_ids) for completion in case.completions)
        is_harmless = after is not None and num_tokens <= after
        require(is_harmless or world.is_closing, "a killer went through", case)


def check_end(world: Any, num_files: int) -> None:
    """Nothing is left of any worker, and the losses are within their bounds."""
    for peer in world.device.launcher.peers:
        require(peer.is_ended, "a worker is left", peer)
    require(num_open_files() == num_files, "descriptors are left", num_open_files(), num_files)
    scenario = world.scenario
    if world.trouble.has_crashed and not world.is_closing:
        require(world.has_died, "the budget is spent, and it goes on", world.losses)
    if len(world.killers) == 1 and not scenario.fates and not world.trouble.num_errors:
        # Halving, one loss that begins it and one that confirms it.
        limit = 2 + math.ceil(math.log2(max(2, scenario.max_num_seqs)))
        require(world.num_deadly <= limit, "a verdict took too many losses", world.num_deadly)

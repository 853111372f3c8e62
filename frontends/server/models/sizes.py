"""Estimate the memory of a model before it is loaded, measure it afterwards, and share the budget among KV caches."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from trouper.config.args import EngineArgs
from trouper.config.context import available_bytes, read_text, weight_bytes
from trouper.config.engine_config import EngineConfig
from trouper.config.model import kv_bytes_per_token
from trouper.config.resolve import resolve
from trouper.errors import TrouperError, TrouperValidationError, UnsupportedFeatureError, invalid
from trouper.frontends.server.models.options import ModelOptions
from trouper.frontends.server.models.policy import AWAKE, ModelMemory, ModelRecord, unfit

MIB = 2**20
# The measured memory of a single worker without weights: torch and the compiled kernels.  Several workers share these pages, so the sum
# is an upper bound.
PROCESS_BYTES = 210 * MIB
# Weights in memory relative to the checkpoint.  They are packed for vector instructions, some in two forms: 1.0 to 1.5 was measured,
# plus the buffers of a step.
PACKED = 1.5
# The default budget, as a share of the available memory at the start of the server.
BUDGET_SHARE = 0.8
# The server process itself.
FRONT_BYTES = 128 * MIB


class ModelPlan(NamedTuple):
    """Hold a model's options, its resolved configuration, and its estimated memory.

    A model in `--models-dir` that cannot be served has an error instead of a configuration.
    """

    options: ModelOptions
    config: EngineConfig | None
    memory: ModelMemory
    error: str | None = None


def default_budget() -> int:
    """Return the budget of a server without `--memory-budget`.

    Raises:
        TrouperValidationError: the system does not report its available memory.
    """
    available = available_bytes()
    if available is None:
        raise invalid(
            "memory_budget", "is required, because the system does not report its available memory"
        )
    return max(0, int(BUDGET_SHARE * (available - FRONT_BYTES)))


def plan_models(models: Sequence[ModelOptions], budget: int) -> list[ModelPlan]:
    """Resolve the options of all models, and give each KV cache without a configured size its share of the budget.

    It reads file headers, so call it in a thread, or before the server starts.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: a model of the command line or of the TOML file has wrong options, or does not
            fit into the budget.
    """
    rough = [_plan(each) for each in models]
    plans = [_with_cache(plan, rough, budget) for plan in rough]
    check_fit(plans, budget)
    return plans


def _plan(options: ModelOptions) -> ModelPlan:
    """Resolve a model without regard to the memory that is free now, because the budget decides instead."""
    args = dataclasses.replace(options.args)
    has_size = args.kv_cache_memory_bytes is not None or args.num_gpu_blocks_override is not None
    if not has_size:
        args.kv_cache_memory_bytes = 2**40
    try:
        config = resolve(args, frontend="server")
        if config.device != "cpu":
            rule = "one server can share several models only on the CPU; start one server for each model, or use --device cpu"
            raise UnsupportedFeatureError(rule, parameter="device")
    except TrouperError as error:
        return _refused(options, error)
    return ModelPlan(options, config, _memory(args, config, has_size=has_size))


def _refused(options: ModelOptions, error: TrouperError) -> ModelPlan:
    if options.is_found:
        return ModelPlan(options, None, ModelMemory(0, 0, 0), str(error))
    parameter = getattr(error, "parameter", None) or "model"
    raise TrouperValidationError(f"{options.name}: {error}", parameter=parameter) from None


def _memory(args: EngineArgs, config: EngineConfig, *, has_size: bool) -> ModelMemory:
    num_workers = config.workers_per_replica * config.data_parallel_size
    weights = weight_bytes(args, config.model, config.dtype) * config.data_parallel_size
    kv = 0
    if config.pooler is None and has_size:
        kv = config.kv_cache_bytes or 0
        if config.num_blocks is not None:
            kv = config.num_blocks * config.block_size * _token_bytes(config)
    return ModelMemory(PROCESS_BYTES * num_workers, int(weights * PACKED), kv * num_workers)


def _token_bytes(config: EngineConfig) -> int:
    return kv_bytes_per_token(config.model, config.dtype) or 0


def _with_cache(plan: ModelPlan, plans: Sequence[ModelPlan], budget: int) -> ModelPlan:
    """Give a model whose KV cache has no configured size an equal share of the budget.

    The share is the budget minus all processes, the pinned models' weights and its own weights, divided by the number of generating models.
    It is at least the size of one sequence of full length, and at most that of `max_num_seqs` such sequences.
    """
    options, config = plan.options, plan.config
    args = options.args
    if config is None or config.pooler is not None:
        return plan
    if args.kv_cache_memory_bytes is not None or args.num_gpu_blocks_override is not None:
        return plan
    others = [each for each in plans if each is not plan]
    pinned = sum(each.memory.weights for each in others if each.options.is_pinned)
    processes = sum(
        each.memory.process for each in plans if each is plan or not each.options.is_found
    )
    num_sharing = sum(each.config is not None and each.config.pooler is None for each in plans)
    room = budget - processes - pinned - plan.memory.weights
    longest = config.max_model_len * max(1, _token_bytes(config))
    share = min(max(room // max(1, num_sharing), longest), config.scheduler.max_num_seqs * longest)
    share = max(min(share, room), config.block_size * max(1, _token_bytes(config)) * 8)
    sized = dataclasses.replace(options.args, kv_cache_memory_bytes=share)
    try:
        config = resolve(dataclasses.replace(sized), frontend="server")
    except TrouperError as error:
        return _refused(options, error)
    options = dataclasses.replace(options, args=sized)
    return ModelPlan(
        options,
        config,
        plan.memory._replace(kv=share * config.workers_per_replica * config.data_parallel_size),
    )


def check_fit(plans: Iterable[ModelPlan], budget: int) -> None:
    """Raise TrouperValidationError if a model can never fit into the budget.

    Models in `--models-dir` are not checked; requests for those that do not fit are refused instead.
    """
    records = [
        ModelRecord(each.options.name, each.memory, is_pinned=each.options.is_pinned)
        for each in plans
        if not each.options.is_found
    ]
    for record, pinned in unfit(records, budget):
        need = record.memory.bytes_in(AWAKE)
        raise invalid(
            "memory_budget",
            f"{record.name} needs {size(need)} in addition to {size(pinned)} of pinned models, "
            f"but the budget is {size(budget)}",
        )


def size(num_bytes: int) -> str:
    """Format a number of bytes in MiB or GiB for readers."""
    if num_bytes >= 10 * 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / MIB:.0f} MiB"


def resident_bytes(pids: Iterable[int]) -> int | None:
    """Return the proportional set size (PSS) of processes in bytes, or None if one of them has ended.

    The kernel walks all pages of a process, which takes about 10 ms, so call it in a thread.
    """
    total = 0
    for pid in pids:
        text = read_text(Path(f"/proc/{pid}/smaps_rollup"))
        lines = [line.split() for line in text.splitlines() if line.startswith("Pss:")]
        if not lines:
            return None
        total += int(lines[0][1]) * 1024
    return total


def corrected(memory: ModelMemory, seen: int, *, has_weights: bool) -> ModelMemory:
    """Raise an estimate to the `seen` bytes, measured while the KV cache was empty.  An estimate never falls."""
    if has_weights:
        return memory._replace(weights=max(memory.weights, seen - memory.process))
    return memory._replace(process=max(memory.process, seen))

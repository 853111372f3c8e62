"""Runs plans on a GPU: it changes the request slots, launches the captured step, and copies its results back.

Laws:
  * Plans run in the order of the calls, on one stream. The sequences, blocks and copies of a plan take effect before its
    forward pass, and its sampled tokens are in their slots before the next plan reads them.
  * `execute` launches without waiting: the next step may be launched before the tokens of this one are known here. No
    launch depends on a value on the device.
  * A captured step reads and writes fixed addresses. Whatever moves them drops the graphs.
  * If the logits of one entry are not finite, only that entry fails.
  * Each of several ranks runs every plan and derives its launches only from the plan, so all ranks add up at the same places
    of the same graphs. The first rank samples, and sends the tokens to the others on the device.
  * A process has one rank and one device: among the visible devices, the one with the rank's number.  Ranks find each other by a file
    without a name that all have inherited, and whatever NCCL opens besides is on the loopback: all ranks of a model are on one machine.
  * A rank that fails or dies no longer takes part in sums; the engine ends the other ranks and starts all of them again.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from trouper.actors.executor.device import DeviceInfo, PendingResult
from trouper.actors.executor.models.decoder import LOGITS_AT_ONCE, plan_keys_of
from trouper.actors.executor.models.native_decoder import NativeDecoder
from trouper.actors.executor.models.sharding import OPTION
from trouper.actors.executor.runners.cuda.machine import CudaMachine, Graph, Machine
from trouper.actors.executor.runners.cuda.readout import DeviceMasks, Readout
from trouper.actors.executor.runners.cuda.resident import (
    GRAPH_BYTES,
    DeviceAdapters,
    DeviceModel,
    Resident,
    kv_budget,
)
from trouper.actors.executor.runners.cuda.step_inputs import (
    BatchShape,
    Changes,
    Inputs,
    Layout,
    graph_shapes,
    inputs_of,
    is_penalised,
    pack,
    padded,
    shape_of,
)
from trouper.actors.executor.runners.resident_model import Profiler, ResidentModel
from trouper.actors.executor.steps.cache_memory import kv_layout, num_kv_blocks
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.executor.weights.decoder import adapted_parameters
from trouper.actors.messages.steps import PoolPlan, StepDone, StepPlan
from trouper.config.adapters import AdapterFiles
from trouper.config.engine_config import EngineConfig
from trouper.errors import UnsupportedFeatureError
from trouper.kernels.cuda.ops import DeviceTokens, TritonOps
from trouper.kernels.cuda.sample import put_tokens_, sample
from trouper.kernels.cuda.sampling_rows import apply_penalties
from trouper.kernels.cuda.top_k_top_p import top_k_top_p


class CudaRunner:
    """The request slots, the sampler and the resident model of one GPU. It belongs to the thread that makes it.

    Args:
        config: resolved; `model.path` contains safetensors or is a GGUF file, unless `load_format` is "dummy".
        machine: the GPU; the current CUDA device by default.
        ranks: the tensor-parallel ranks, each on a GPU of its own, if there are several.
    """

    # The CPU only launches kernels, so torch needs no threads.
    is_tiny = True

    def __init__(
        self,
        config: EngineConfig,
        machine: Machine | None = None,
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        self._config = config
        self._machine = CudaMachine() if machine is None else machine
        self._source = DeviceModel(config, self._machine, ranks)
        self._shard = self._source.part.shard
        self._samples = self._shard.rank == 0
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        scheduler, longest = config.scheduler, config.max_model_len
        self._slots = RequestSlots(scheduler.max_num_seqs, longest, config.block_size)
        max_num_blocks = self._slots.block_ids.shape[1]
        self._layout = Layout(
            scheduler.max_num_seqs, longest, max_num_blocks, self._source.part.traits.vocab_size
        )
        self._masks = DeviceMasks(self._slots, self._layout)
        self._adapters: DeviceAdapters | None = None
        if config.lora is not None:
            self._adapters = DeviceAdapters(
                config.lora, self._dtype, self._machine, scheduler.max_num_scheduled_tokens
            )
            for parameter in adapted_parameters(self._source.part.whole):
                self._adapters.slots.know(parameter)
        self._model = ResidentModel[NativeDecoder[TritonOps], Resident](
            self._source,
            partial(
                Resident.allocate,
                self._machine,
                self._layout,
                block_size=config.block_size,
                dtype=self._dtype,
            ),
            None if self._adapters is None else self._adapters.slots,
            self._source,
        )
        self._graphs: dict[BatchShape, Graph] = {}
        self._profiler = Profiler()
        self.start_profile, self.stop_profile = self._profiler.start, self._profiler.stop

    def load(self) -> DeviceInfo:
        """Read the weights, measure the memory of a step, use the rest as KV memory, and capture graphs.

        Raises:
            TrouperValidationError: the checkpoint does not fit the config, or the memory is too small.
        """
        config = self._config
        self._wake_weights()
        self._model.num_blocks = self._num_blocks_that_fit()
        self.wake(frozenset({"weights", "kv_cache"}))
        return DeviceInfo(
            self._model.num_blocks,
            config.block_size,
            config.dtype,
            self._machine.name,
            layout=kv_layout(config, self._source.cache_specs, self._dtype.itemsize),
        )

    # Memory

    def sleep(self, level: int) -> None:
        """Give back KV memory and slots. Weights move to host memory at level 1, and are dropped at level 2."""
        if level >= 1:
            self._graphs.clear()
            self._masks.clear()
            if self._adapters is not None:
                with torch.inference_mode():
                    self._adapters.sleep()
        self._model.sleep(level)
        self.release()

    def wake(self, tags: frozenset[str]) -> None:
        """Make `weights` and `kv_cache` resident, as far as `tags` names them and they are absent.

        Steps are captured again once both are resident, because the addresses have changed.
        """
        if "weights" in tags:
            self._wake_weights()
        if "kv_cache" in tags:
            self._allocate()
        if self._model.is_resident and not self._graphs:
            self._capture()

    def release(self) -> None:
        """Give back memory to which nothing refers any more.

        Other programs on the GPU can then use it.
        """
        self._machine.release()

    def close(self) -> None:
        """Give back the memory. Idempotent."""
        self._adapters = None
        self.sleep(2)
        self._model.close()
        self.release()

    def load_adapter(self, slot: int, files: AdapterFiles) -> None:
        """Put an adapter into a slot; see `ResidentModel.load_adapter`."""
        self._model.load_adapter(slot, files)

    def _wake_weights(self) -> None:
        self._model.load_weights()
        if self._adapters is not None:
            with torch.inference_mode():
                self._adapters.wake_weights()

    def _allocate(self, num_blocks: int | None = None) -> None:
        if self._model.memory is None:
            self._model.allocate(num_blocks)
            if self._adapters is not None:
                self._adapters.allocate()

    def _num_blocks_that_fit(self) -> int:
        """Return the number of KV blocks: the config's, or as many as fit in addition to the largest step."""
        config = self._config
        if config.num_blocks is None and config.kv_cache_bytes is None:
            self._allocate(1)
            shapes, scheduler = self._shapes, config.scheduler
            has_adapters = self._adapters is not None
            largest = BatchShape(
                scheduler.max_num_scheduled_tokens, scheduler.max_num_seqs, False, has_adapters
            )
            reserved = self._machine.peak_of(partial(self._run, largest))
            if shapes:
                reserved += self._machine.peak_of(partial(self._run, shapes[0]))
            self.release()
            free, total = self._machine.memory()
            budget = kv_budget(
                free=free,
                total=total,
                utilization=config.gpu_memory_utilization,
                reserved=reserved + len(shapes) * GRAPH_BYTES,
            )
            self._model.drop_memory()
            config = msgspec.structs.replace(config, kv_cache_bytes=budget)
        return num_kv_blocks(config, self._source.cache_specs, self._dtype.itemsize)

    @property
    def _shapes(self) -> tuple[BatchShape, ...]:
        scheduler = self._config.scheduler
        return graph_shapes(
            self._config.graphs,
            scheduler.max_num_seqs,
            scheduler.max_num_scheduled_tokens,
            has_adapters=self._adapters is not None,
        )

    @torch.inference_mode()
    def _capture(self) -> None:
        """Capture every shape on a batch that consists of padding, which computes nothing."""
        _, resident = self._model.resident()
        self._machine.upload(pack(None, self._layout.num_slots + 1), out=resident.inputs)
        shapes = self._shapes
        bar = tqdm(shapes, "capturing CUDA graphs", disable=None)
        graphs = self._machine.capture(partial(self._run, shape) for shape in bar)
        self._graphs = dict(zip(shapes, graphs, strict=True))

    # Steps

    def execute(
        self, plan: StepPlan | PoolPlan
    ) -> PendingResult[StepDone | None] | StepDone | None:
        """Launch one plan, which only the rank that samples answers.

        After an exception the scheduler must send the plan's sequences again. Launching returns before the GPU has
        finished.
        """
        assert isinstance(plan, StepPlan), "this model generates"
        _, resident = self._model.resident()
        with torch.inference_mode():
            self._masks.catch_up(plan)
            self._apply_changes(plan, resident)
            if not plan.request_slots:
                return StepDone(plan.step, ()) if self._samples else None
            broken: tuple[int, ...] = ()
            has_masks = self._masks.any_in(plan)
            if has_masks:
                changes, broken = self._masks.changes(plan)
                self._write(changes, resident)
            self._machine.upload(pack(plan, self._layout.num_slots + 1), out=resident.inputs)
            counts = np.array(plan.num_scheduled_tokens)
            first_tokens = counts.cumsum() - counts
            embeds = tuple(
                (first, self._machine.to_device(rows_PE))
                for first, rows_PE in self._slots.take_embeds(plan, first_tokens)
            )
            shape = shape_of(plan)
            if self._adapters is not None:
                has_any = self._adapters.begin_step(plan, self._slots.adapters)
                shape = shape._replace(has_adapters=has_any)
            graph = None if embeds else self._graphs.get(padded(shape, self._graphs))
            if graph is None:
                hidden, logits, sampled = self._run(shape, embeds)
            else:
                graph.replay()
                hidden, logits, sampled = graph.outputs
            if not self._samples:
                self._add_prompt_logprobs(plan, first_tokens, hidden, None)
                end = self._machine.download(())
                return PendingResult(end.is_ready, lambda: _nothing(end))
            readout = Readout(plan, sampled, broken, self._masks.take_work())
            readout.add_samples(logits, [self._slots.sampling[slot] for slot in plan.request_slots])
            self._add_prompt_logprobs(plan, first_tokens, hidden, readout)
            result = readout.download(self._machine)
            return self._masks.follow(plan, result) if has_masks else result

    def _apply_changes(self, plan: StepPlan, resident: Resident) -> None:
        changes = Changes(self._layout)
        for new in plan.new_sequences:
            self._slots.place(new)
            self._masks.place(new if self._samples else msgspec.structs.replace(new, grammar=None))
            changes.place(new)
        for slot, block_ids in plan.new_blocks:
            changes.put("blocks", slot, block_ids, at=int(self._slots.num_blocks[slot]))
            self._slots.add_blocks(slot, block_ids)
        self._write(changes, resident)
        for new in plan.new_sequences:
            # Only the rank that samples applies penalties.
            if self._samples and is_penalised(new.sampling):
                resident.write_history(new, self._slots.token_spans(new.request_slot))
        resident.kv.copy_blocks(plan.copies)

    def _write(self, changes: Changes, resident: Resident) -> None:
        packed = changes.packed()
        if packed is not None:
            addresses, words = self._machine.upload(packed)
            resident.arena.index_copy_(0, addresses, words.to(torch.int32))

    @torch.inference_mode()
    def _run(
        self, shape: BatchShape, embeds: tuple[tuple[int, Tensor], ...] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Launch the forward pass and sampling. Returns hidden states [T, E], logits [C, V] and sampled ids [C]."""
        decoder, resident = self._model.resident()
        if self._adapters is not None:
            self._adapters.use(are_used=shape.has_adapters)
        tokens, blocks, sampling = resident.views
        inputs: Inputs = inputs_of(resident.inputs, shape.num_entries)
        step_tokens = DeviceTokens(
            bounds=inputs.bounds,
            request_slots=inputs.request_slots,
            num_computed_tokens=inputs.num_computed_tokens,
            token_ids=tokens,
            block_ids=blocks,
            num_tokens=shape.num_tokens,
            is_decode=shape.is_decode,
        )
        # A GPU has one block table, so the keys are the windows.
        windows = plan_keys_of(self._source.cache_specs)
        plans = {window: decoder.plan(step_tokens, window) for window in windows}
        hidden_TE = decoder.forward(step_tokens, plans, resident.kv.layers, embeds)
        logits_CV = decoder.logits(hidden_TE.index_select(0, inputs.last_tokens))
        slots, seq_lens = inputs.sampled_slots, inputs.seq_lens
        if self._samples:
            edited_CV = apply_penalties(logits_CV, slots, seq_lens, tokens, sampling)
            kept = top_k_top_p(logits_CV, edited_CV, slots, sampling)
            sampled_C = sample(logits_CV, edited_CV, slots, seq_lens, *kept, tokens, sampling)
        else:
            sampled_C = torch.empty_like(slots)
        if self._source.sums is not None:
            self._source.sums.tell(sampled_C)
            if not self._samples:
                put_tokens_(sampled_C, slots, seq_lens, tokens)
        return hidden_TE, logits_CV, sampled_C

    def _add_prompt_logprobs(
        self, plan: StepPlan, first_tokens: np.ndarray, hidden_TE: Tensor, readout: Readout | None
    ) -> None:
        """Add the requested logprobs of prompt tokens behind the positions of this step.

        A rank without a readout only computes its part of the logits.
        """
        decoder, _ = self._model.resident()
        for span in self._slots.prompt_spans(plan, first_tokens):
            num = len(span.token_ids)
            hidden = hidden_TE.narrow(0, span.first_token, num)
            following = span.token_ids.astype(np.int32)
            on_device = None if readout is None else self._machine.upload(following)
            for at in range(0, num, LOGITS_AT_ONCE):
                rows = slice(at, at + LOGITS_AT_ONCE)
                logits = decoder.logits(hidden[rows])
                if readout is not None and on_device is not None:
                    readout.add_prompt(
                        span.entry, logits, following[rows], on_device[rows], span.num_top
                    )


def _nothing(end: PendingResult[list[np.ndarray]]) -> None:
    """Wait for the end of a step that another rank answers. An error of the device is raised here."""
    end.finish()


# The time limit of collective calls. It is longer than any load, because the workers have a deadline of their own for steps.
PATIENCE = timedelta(hours=1)


class RankRunner(CudaRunner):
    """One rank of the config's model, on a GPU of its own.

    Args:
        rank: the number of this rank.
        files: the descriptor of the file through which the ranks find each other.

    Raises:
        TrouperValidationError: the model cannot be divided among this many ranks.
        UnsupportedFeatureError: this build of torch has no NCCL.
    """

    def __init__(self, config: EngineConfig, rank: int, files: Sequence[int]) -> None:
        num_ranks = config.tensor_parallel_size
        machine = CudaMachine(rank)
        self._group_file = files[0]
        super().__init__(config, machine, join_group(machine, files[0], rank, num_ranks))
        self.start_profile = self._start_profile

    def __repr__(self) -> str:
        return f"<RankRunner {self._shard.rank} of {self._shard.size} on {self._machine.name}>"

    def _start_profile(self, folder: str, prefix: str) -> None:
        """Begin a trace of this rank, in a file of its own."""
        self._profiler.start(folder, f"{prefix}-rank-{self._shard.rank}")

    def close(self) -> None:
        super().close()
        if self._source.leave_ranks():
            dist.destroy_process_group()
            os.close(self._group_file)


def join_group(machine: Machine, file: int, rank: int, num_ranks: int) -> dist.ProcessGroup:
    """Join the group of all ranks.

    Waits until every rank has joined.  The descriptor leads to a file that all ranks share.

    Raises:
        UnsupportedFeatureError: torch was built without the backend of collective calls.
    """
    if not dist.is_available() or not dist.is_backend_available(machine.backend):
        raise UnsupportedFeatureError(
            f"{OPTION}={num_ranks} needs {machine.backend.upper()}, which this build of torch lacks",
            parameter=OPTION,
        )
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        machine.backend,
        store=dist.FileStore(f"/proc/self/fd/{file}", num_ranks),  # pyright: ignore[reportPrivateImportUsage]  # torch's stubs
        rank=rank,
        world_size=num_ranks,
        timeout=PATIENCE,
        device_id=machine.device if machine.device.type == "cuda" else None,
    )
    group = dist.group.WORLD
    assert group is not None
    return group

"""Runs plans on a GPU: changes of the rows, the captured step, the way back of its results.

Laws:
  * Plans run in the order of the calls, on one stream; a plan's rows, blocks and copies take effect before
    its pass, and the tokens it samples are in their rows before the next one reads them.
  * `step` launches and does not wait: the next step may be launched before this one's tokens are known
    here.  Nothing that it launches depends on a value on the device.
  * A captured step reads and writes fixed addresses; whatever moves them forgets the graphs.
  * A column with logits that are not finite fails alone.
"""

from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from trouper.actors.executor.batch import Rows, embeds_of
from trouper.actors.executor.cuda import memory
from trouper.actors.executor.cuda.inputs import Inputs, inputs_of, pack
from trouper.actors.executor.cuda.machine import CudaMachine, Graph, Machine
from trouper.actors.executor.cuda.readout import Readout
from trouper.actors.executor.cuda.resident import Resident
from trouper.actors.executor.cuda.shapes import Shape, graph_shapes, padded, shape_of
from trouper.actors.executor.cuda.tables import Changes, Layout, is_penalised
from trouper.actors.executor.device import DeviceInfo, Later
from trouper.actors.executor.kv_memory import kv_cache_specs, num_kv_blocks
from trouper.actors.executor.models.decoder import LOGITS_AT_ONCE, Decoder, ops_config
from trouper.actors.executor.models.registry import decoder_traits
from trouper.actors.executor.profiler import Profiler
from trouper.actors.executor.weights.decoder import load_decoder
from trouper.actors.messages.plans import PoolPlan, StepPlan
from trouper.actors.messages.results import StepDone
from trouper.config.args import EngineConfig
from trouper.kernels.cuda.apply_penalties import apply_penalties
from trouper.kernels.cuda.ops import DeviceTokens, TritonOps
from trouper.kernels.cuda.sample import sample
from trouper.kernels.cuda.top_k_top_p import top_k_top_p

Part = tuple[int, Tensor]  # first token of the batch, and the embeddings from there on


class CudaRunner:
    """The model, its KV memory and the rows.  Belongs to the thread that makes it.

    Args:
        config: resolved; `model.path` holds safetensors unless `load_format` is "dummy".
        machine: None = the current CUDA device.
    """

    is_tiny = True  # for torch's threads: the CPU only launches

    def __init__(self, config: EngineConfig, machine: Machine | None = None) -> None:
        self._config = config
        self._machine = CudaMachine() if machine is None else machine
        self._traits = decoder_traits(config.model.hf_config, config.model.architecture)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        scheduler, longest = config.scheduler, config.max_model_len
        self._rows = Rows(scheduler.max_num_seqs, longest, config.block_size)
        max_num_blocks = self._rows.block_ids.shape[1]
        self._layout = Layout(
            scheduler.max_num_seqs, longest, max_num_blocks, self._traits.vocab_size
        )
        self._kv_specs = kv_cache_specs(self._traits)
        self._num_kv_blocks = 0
        self._decoder: Decoder[TritonOps] | None = None
        self._is_on_host = False  # the decoder's weights
        self._resident: Resident | None = None
        self._graphs: dict[Shape, Graph] = {}
        self._profiler = Profiler()
        self.start_profile, self.stop_profile = self._profiler.start, self._profiler.stop

    def load(self) -> DeviceInfo:
        """Read the weights, measure what a step takes, take the rest for KV memory, capture.

        Raises:
            TrouperValidationError: the checkpoint does not fit the config, or the memory is too small.
        """
        config = self._config
        self._wake_weights()
        self._num_kv_blocks = self._num_blocks_that_fit()
        self.wake(frozenset({"weights", "kv_cache"}))
        return DeviceInfo(self._num_kv_blocks, config.block_size, config.dtype, self._machine.name)

    # Memory

    def sleep(self, level: int) -> None:
        """From level 1 on KV memory and rows go, and the weights: to host memory, at level 2 nowhere."""
        if level >= 1:
            self._graphs.clear()
            self._resident = None
        if level >= 2:
            self._decoder, self._is_on_host = None, False
        elif level == 1 and self._decoder is not None and not self._is_on_host:
            with torch.inference_mode():
                self._decoder.move(self._machine.to_host)
            self._is_on_host = True
        self.release()

    def wake(self, tags: frozenset[str]) -> None:
        """Make `weights` and `kv_cache` resident, as far as `tags` names them and they are not."""
        if "weights" in tags:
            self._wake_weights()
        if "kv_cache" in tags and self._resident is None:
            self._resident = self._allocate(self._num_kv_blocks)
        if self._is_resident and not self._graphs:
            self._capture()

    def release(self) -> None:
        """Give back what nobody holds any more."""
        self._machine.release()

    def close(self) -> None:
        """Give back the memory.  Idempotent."""
        self.sleep(2)

    @property
    def _is_resident(self) -> bool:
        return self._decoder is not None and not self._is_on_host and self._resident is not None

    def _wake_weights(self) -> None:
        with torch.inference_mode():
            if self._decoder is None:
                self._decoder = self._load_decoder()
            elif self._is_on_host:
                self._decoder.move(self._machine.to_device)
            self._is_on_host = False

    def _load_decoder(self) -> Decoder[TritonOps]:
        config = self._config
        ops = TritonOps(
            ops_config(self._traits, self._dtype, config.block_size),
            max_length=config.max_model_len,
            is_invariant=config.batch_invariant,
        )
        return load_decoder(
            config,
            self._traits,
            ops=lambda: ops,
            device=self._machine.device,
            layout="invariant" if config.batch_invariant else "plain",
        )

    def _allocate(self, num_blocks: int) -> Resident:
        return Resident.allocate(
            self._machine,
            self._layout,
            self._kv_specs,
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            dtype=self._dtype,
        )

    def _num_blocks_that_fit(self) -> int:
        """As many as the memory holds when the largest step has what it needs, unless the user says."""
        config = self._config
        if config.num_blocks is None and config.kv_cache_bytes is None:
            self._resident = self._allocate(1)
            shapes, scheduler = self._shapes, config.scheduler
            largest = Shape(scheduler.max_num_scheduled_tokens, scheduler.max_num_seqs, False)
            reserved = self._machine.peak_of(partial(self._run, largest))
            if shapes:
                reserved += self._machine.peak_of(partial(self._run, shapes[0]))
            self.release()
            free, total = self._machine.memory()
            budget = memory.kv_budget(
                free=free,
                total=total,
                utilization=config.gpu_memory_utilization,
                reserved=reserved + len(shapes) * memory.GRAPH_BYTES,
            )
            self._resident = None
            config = msgspec.structs.replace(config, kv_cache_bytes=budget)
        return num_kv_blocks(config, self._kv_specs, self._dtype.itemsize)

    @property
    def _shapes(self) -> tuple[Shape, ...]:
        scheduler = self._config.scheduler
        return graph_shapes(
            self._config.graphs, scheduler.max_num_seqs, scheduler.max_num_scheduled_tokens
        )

    def _capture(self) -> None:
        """Every shape, on a batch of padding alone, which computes nothing."""
        assert self._resident is not None
        self._machine.upload(pack(None, self._layout.num_rows + 1), out=self._resident.inputs)
        shapes = self._shapes
        bar = tqdm(shapes, "capturing CUDA graphs", disable=None)
        graphs = self._machine.capture(partial(self._run, shape) for shape in bar)
        self._graphs = dict(zip(shapes, graphs, strict=True))

    # Steps

    def execute(self, plan: StepPlan | PoolPlan) -> Later[StepDone] | StepDone:
        """Launch one plan.  After an exception the rows of the plan must be given again."""
        assert isinstance(plan, StepPlan), "this model generates"
        resident = self._resident
        if resident is None or not self._is_resident:
            raise RuntimeError("a step while weights or KV memory are absent")
        with torch.inference_mode():
            self._apply_changes(plan, resident)
            if not plan.request_slots:
                return StepDone(plan.step, ())
            self._machine.upload(pack(plan, self._layout.num_rows + 1), out=resident.inputs)
            parts = self._embeds(plan)
            shape = shape_of(plan)
            graph = None if parts else self._graphs.get(padded(shape, self._graphs))
            if graph is None:
                hidden, logits, sampled = self._run(shape, parts)
            else:
                graph.replay()
                hidden, logits, sampled = graph.outputs
            readout = Readout(plan, sampled)
            readout.add_samples(logits, [self._rows.sampling[row] for row in plan.request_slots])
            self._add_prompt_logprobs(plan, hidden, readout)
            return readout.download(self._machine)

    def _apply_changes(self, plan: StepPlan, resident: Resident) -> None:
        changes = Changes(self._layout)
        for new in plan.new_sequences:
            self._rows.place(new)
            changes.place(new)
        for row, block_ids in plan.new_blocks:
            changes.put("blocks", row, block_ids, at=int(self._rows.num_blocks[row]))
            self._rows.add_blocks(row, block_ids)
        packed = changes.packed()
        if packed is not None:
            addresses, words = self._machine.upload(packed)
            resident.arena.index_copy_(0, addresses, words.to(torch.int32))
        for new in plan.new_sequences:
            if is_penalised(new.sampling):
                resident.write_history(new, self._rows.token_spans(new.request_slot))
        resident.kv.copy_blocks(plan.copies)

    @torch.inference_mode()
    def _run(self, shape: Shape, embeds: tuple[Part, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
        """The pass and the draw: hidden states [T, E], logits [C, V], sampled ids [C]."""
        decoder, resident = self._decoder, self._resident
        assert decoder is not None
        assert resident is not None
        tokens, blocks, sampling = resident.views
        inputs: Inputs = inputs_of(resident.inputs, shape.num_columns)
        step_tokens = DeviceTokens(
            bounds=inputs.bounds,
            request_slots=inputs.rows,
            num_computed_tokens=inputs.starts,
            token_ids=tokens,
            block_ids=blocks,
            num_tokens=shape.num_tokens,
            is_decode=shape.is_decode,
        )
        plans = {window: decoder.ops.plan(step_tokens, window) for window in self._traits.windows}
        hidden_TE = decoder.forward(step_tokens, plans, resident.kv.layers, embeds)
        logits_CV = decoder.logits(hidden_TE.index_select(0, inputs.last))
        rows, ends = inputs.sampled, inputs.ends
        edited_CV = apply_penalties(logits_CV, rows, ends, tokens, sampling)
        kept = top_k_top_p(logits_CV, edited_CV, rows, sampling)
        sampled_C = sample(logits_CV, edited_CV, rows, ends, *kept, tokens, sampling)
        return hidden_TE, logits_CV, sampled_C

    def _embeds(self, plan: StepPlan) -> tuple[Part, ...]:
        firsts = np.cumsum(plan.num_scheduled_tokens) - plan.num_scheduled_tokens
        return tuple(
            (first, self._machine.to_device(part))
            for first, part in embeds_of(plan, self._rows, firsts)
        )

    def _add_prompt_logprobs(self, plan: StepPlan, hidden_TE: Tensor, readout: Readout) -> None:
        """Of the prompt tokens that follow the positions of this step, where they were asked for."""
        decoder, rows = self._decoder, self._rows
        assert decoder is not None
        firsts = np.cumsum(plan.num_scheduled_tokens) - plan.num_scheduled_tokens
        for column, (row, start) in enumerate(
            zip(plan.request_slots, plan.num_computed_tokens, strict=True)
        ):
            num_top = rows.sampling[row].prompt_logprobs
            count = min(plan.num_scheduled_tokens[column], int(rows.num_prompt[row]) - 1 - start)
            if num_top is None or count <= 0:
                continue
            hidden = hidden_TE.narrow(0, int(firsts[column]), count)
            following = rows.token_ids[row, start + 1 : start + 1 + count].astype(np.int32)
            on_device = self._machine.upload(following)
            for at in range(0, count, LOGITS_AT_ONCE):
                piece = slice(at, at + LOGITS_AT_ONCE)
                logits = decoder.logits(hidden[piece])
                readout.add_prompt(column, logits, following[piece], on_device[piece], num_top)

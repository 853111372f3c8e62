"""Runs pooling plans: whole prompts in a few forward passes, without a KV cache. It is synchronous.

Each pass runs in a thread of its own. Threads that share a pass would wait for each other after every operation, and for
data in each other's caches: MiniLM in bfloat16 on two cores embeds 430 texts/s that way, and 540 with a pass per thread.
After a pass a thread takes the next one, even of the next plan, so no thread waits for the end of a plan.

Laws:
  * Entries arrive sorted by length. Entries of one length form one group of the attention.
  * Nothing is padded, and nothing is kept between plans.
  * Results are raw float32 arrays. The Pooler does everything that needs no model.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.device import DeviceInfo, PendingResult
from trouper.actors.executor.media.encoder import MediaEncoder
from trouper.actors.executor.media.tower import ADVICE
from trouper.actors.executor.models.encoder import Encoder
from trouper.actors.executor.models.encoder_traits import EncoderTraits, Head
from trouper.actors.executor.models.families.registry import (
    decoder_traits,
    encoder_traits,
    generating_sibling,
)
from trouper.actors.executor.models.traits import DecoderTraits
from trouper.actors.executor.runners.cpu.process_resources import (
    compute_with,
    give_back_free_memory,
)
from trouper.actors.executor.runners.cpu.recorded_steps import RecordedEncoderSteps
from trouper.actors.executor.runners.cpu.unpaged_decoder import UnpagedDecoder
from trouper.actors.executor.runners.resident_model import Profiler
from trouper.actors.executor.steps.batch import from_numpy
from trouper.actors.executor.steps.request_slots import Axes
from trouper.actors.executor.weights.encoder import (
    Project,
    Tensors,
    load_encoder,
    load_head,
    load_projection,
    load_splade,
    load_token_classifier,
)
from trouper.actors.executor.weights.tower import load_tower
from trouper.actors.messages.media import spans_of
from trouper.actors.messages.steps import PoolDone, PoolEntry, PoolPlan, StepPlan
from trouper.config.adapters import AdapterFiles
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.config.engine_config import EngineConfig
from trouper.errors import UnsupportedFeatureError
from trouper.kernels.codegen.recording import NotRecordableError
from trouper.kernels.cpu.attention.varlen import UNLIMITED, Group, positions_of
from trouper.kernels.cpu.encoder_ops import RowPooling

logger = logging.getLogger(__name__)

# See `runner.TINY_BYTES`; the limit is lower here because every batch has many tokens.
TINY_BYTES = 4 * 2**20
FEW_TOKENS = 32
NO_ROWS: Mapping[bytes, Tensor] = {}
# A thread must start within this many seconds; otherwise it is an error.
START_S = 60.0
# The tokens of one pass: a layer's activations then fit into the L2 cache. Each further pass costs 0.4 ms of Python.
SLICE_TOKENS = 512
# A plan is divided into several passes only if each has this many tokens. All threads together compute fewer sooner.
LEAST_TOKENS = 128


class UnpagedModel(Protocol):
    """A model that computes the hidden states of whole prompts: an encoder, or a decoder without a KV cache.

    Hidden states of a prompt depend on no earlier step, so passes can run in any thread.
    """

    @property
    def num_bytes(self) -> int:
        """Return the bytes of weights that a pass reads."""
        ...

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        type_ids_T: Tensor,
        groups: Sequence[Group],
    ) -> Tensor:
        """Compute the hidden states [T, E] of prompts that follow each other, in groups of one length."""
        ...


class PoolingRunner:
    """A pooling model and its heads. It belongs to the thread that calls `load`, which also executes plans."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.pooler is not None
        self._config = config
        self._spec = config.pooler
        model = config.model
        self._traits: EncoderTraits | DecoderTraits = encoder_traits(
            model.hf_config, model.architecture
        ) or decoder_traits(
            model.hf_config, generating_sibling(model.architecture), may_see_ahead=True
        )
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        size = self._traits.hidden_size
        self._pool = RowPooling(config.pooler.seq_pooling_type, self._dtype, size)
        self._model: UnpagedModel | None = None
        # By thread, because each thread has its own inputs and activations.
        self._recorded_steps: dict[int, RecordedEncoderSteps] = {}
        self._is_recorded = not config.enforce_eager
        self._is_pooled_late = (
            isinstance(self._traits, EncoderTraits) and self._traits.head.is_before_pooling
        )
        self._images = _image_encoder(config, self._traits)
        self._embed: Project | None = None
        self._classify: Project | None = None
        # Their queue is bounded by the passes of `max_steps_in_flight` plans.
        self._workers = _lone_threads(torch.get_num_threads())
        # Launched and unfinished plans.
        self._num_launched = 0
        self._profiler = Profiler()
        self.start_profile, self.stop_profile = self._profiler.start, self._profiler.stop

    def load(self) -> DeviceInfo:
        """Read the weights. There are no KV blocks, so the device reports one.

        Raises:
            TrouperValidationError: the checkpoint does not fit the config.
        """
        self.wake(frozenset({"weights"}))
        config = self._config
        return DeviceInfo(
            num_blocks=1, block_size=config.block_size, dtype=config.dtype, name="cpu"
        )

    def sleep(self, level: int) -> None:
        """Discard the weights at level 2, and rows of images at level 1. There is no KV memory to discard."""
        if self._images is not None:
            self._images.sleep(level)
        if level >= 2:
            self._model = self._embed = self._classify = None
            self._recorded_steps.clear()
        self.release()

    def release(self) -> None:
        """Give free memory back to the system.

        Freed weights would otherwise stay in the allocator's cache.
        """
        give_back_free_memory()

    def wake(self, tags: frozenset[str]) -> None:
        """Read the weights, if `tags` names them and they are not resident.

        Their file is read again, because level 2 has discarded them.
        """
        if "weights" in tags and self._model is None:
            with torch.inference_mode():
                self._load()

    def load_adapter(self, slot: int, files: AdapterFiles) -> None:
        """Refuse an adapter; the config of a pooling model refuses `enable_lora` before."""
        raise UnsupportedFeatureError("a pooling model takes no adapters", parameter="enable_lora")

    @property
    def is_tiny(self) -> bool:
        """Whether one thread computes the model sooner than several.

        Several threads would wait for each other longer than they compute.
        """
        return self._model is not None and self._model.num_bytes < TINY_BYTES

    def close(self) -> None:
        """Give back the memory and the threads. Idempotent.

        No plan may be running.  The runner cannot be used afterwards.
        """
        self.sleep(2)
        self._workers.shutdown()

    def execute(self, plan: StepPlan | PoolPlan) -> PoolDone | PendingResult[PoolDone]:
        """Run one plan: a single pass in this thread if all cores are idle, otherwise each pass in a worker thread.

        The results have the order of the entries.
        """
        assert isinstance(plan, PoolPlan), "this model pools"
        if self._model is None:
            raise RuntimeError("cannot run a step: the weights are not loaded")
        rows = self._rows_of(plan)
        parts = slices(plan.entries, torch.get_num_threads())
        if len(parts) > 1 or self._num_launched or self._is_for_one(parts[0]):
            return self._launch(plan.step, parts, rows)
        with torch.inference_mode():
            return PoolDone(plan.step, tuple(self._run(parts[0], rows)))

    def _rows_of(self, plan: PoolPlan) -> dict[bytes, Tensor]:
        """Compute the rows of all images of a plan with all cores, before its passes are divided among threads."""
        items = {item.key: item for entry in plan.entries for item in entry.media}
        if not items:
            return {}
        assert self._images is not None, "the renderer refuses images without an encoder"
        return {key: self._images.rows(item) for key, item in items.items()}

    def _is_for_one(self, columns: Sequence[PoolEntry]) -> bool:
        """Whether one core computes the texts sooner than it wakes another core for each operation.

        A recorded pass wakes the others only once, so this does not hold for it.
        """
        return not self._can_record and sum(len(c.token_ids) for c in columns) <= FEW_TOKENS

    def _launch(
        self, step: int, parts: Sequence[Sequence[PoolEntry]], rows: dict[bytes, Tensor]
    ) -> PendingResult[PoolDone]:
        passes = [self._workers.submit(self._run_alone, part, rows) for part in parts]
        self._num_launched += 1

        def is_ready() -> bool:
            return all(done.done() for done in passes)

        def finish() -> PoolDone:
            self._num_launched -= 1
            wait(passes)
            return PoolDone(step, tuple(chain(*(done.result() for done in passes))))

        def when_ready(act: Callable[[], None]) -> None:
            def note(_: Future[list[np.ndarray]]) -> None:
                if is_ready():
                    act()

            for done in passes:
                done.add_done_callback(note)

        return PendingResult(is_ready, finish, when_ready)

    def _run_alone(
        self, columns: Sequence[PoolEntry], rows: dict[bytes, Tensor]
    ) -> list[np.ndarray]:
        with torch.inference_mode():
            return self._run(columns, rows)

    def _run(
        self, columns: Sequence[PoolEntry], rows: Mapping[bytes, Tensor] = NO_ROWS
    ) -> list[np.ndarray]:
        """Compute one forward pass and pool its hidden states.

        Args:
            rows: the rows of images by key.
        """
        assert self._model is not None
        # numpy is used because every call of torch releases the GIL, and the event loop may keep it for a millisecond.
        token_ids = np.concatenate([np.array(column.token_ids, np.int64) for column in columns])
        groups = _groups(columns)
        if rows and any(column.media for column in columns):
            hidden_TE = self._forward_images(token_ids, columns, groups, rows)
        else:
            hidden_TE = self._forward(token_ids, _type_ids(columns), groups)
        return self._finish(hidden_TE, columns, groups)

    def _forward(
        self, token_ids: np.ndarray, type_ids: np.ndarray | None, groups: Sequence[Group]
    ) -> Tensor:
        assert self._model is not None
        recorded = self._steps_of_thread()
        if recorded is not None and recorded.can_forward(len(token_ids)):
            try:
                return recorded.forward(token_ids, type_ids, groups)
            except NotRecordableError as error:
                logger.info("steps are not recorded: %s", error)
                self._is_recorded = False
        if type_ids is None:
            type_ids = np.zeros_like(token_ids)
        positions = (
            self._model.positions(token_ids, groups)
            if isinstance(self._model, Encoder)
            else positions_of(groups)
        )
        ids_T, positions_T, types_T = map(from_numpy, (token_ids, positions, type_ids))
        return self._model.forward(ids_T, positions_T, types_T, groups)

    def _forward_images(
        self,
        token_ids: np.ndarray,
        columns: Sequence[PoolEntry],
        groups: Sequence[Group],
        rows: Mapping[bytes, Tensor],
    ) -> Tensor:
        assert isinstance(self._model, UnpagedDecoder)
        positions = positions_of(groups)
        embeds, axes = _embeds(columns, rows), _axes(columns)
        media = self._config.media
        kind = "" if media is None else media.family.spans
        spans = [spans_of(kind, column.media, len(column.token_ids)) for column in columns]
        return self._model.forward(
            from_numpy(token_ids),
            from_numpy(positions),
            from_numpy(np.zeros_like(token_ids)),
            groups,
            embeds,
            None if axes is None else from_numpy(axes),
            {i: found for i, found in enumerate(spans) if found},
        )

    @property
    def _can_record(self) -> bool:
        return self._is_recorded and isinstance(self._model, Encoder) and self._model.is_recordable

    def _steps_of_thread(self) -> RecordedEncoderSteps | None:
        if not self._can_record:
            return None
        assert isinstance(self._model, Encoder)
        me = threading.get_ident()
        if me not in self._recorded_steps:
            self._recorded_steps[me] = RecordedEncoderSteps(self._model)
        return self._recorded_steps[me]

    def _finish(
        self,
        hidden_TE: Tensor,
        columns: Sequence[PoolEntry],
        groups: Sequence[Group],
    ) -> list[np.ndarray]:
        tasks = {column.task for column in columns}
        rows: dict[str, np.ndarray] = {}
        if "classify" in tasks and self._is_pooled_late:
            logits_TL = self._project("classify")(hidden_TE.float()).numpy()
            lengths = np.array([len(column.token_ids) for column in columns])
            starts = np.cumsum(lengths) - lengths
            rows["classify"] = np.add.reduceat(logits_TL, starts) / lengths[:, None]
            tasks.remove("classify")
        if self._spec.splade is not None:  # every text on its own, with all its tokens
            tasks.discard("embed")
        if tasks & {"embed", "classify"}:
            pooled_CE = self._pool(hidden_TE, groups)
            rows |= {
                task: self._project(task)(pooled_CE).numpy()
                for task in tasks & {"embed", "classify"}
            }
        arrays: list[np.ndarray] = []
        first = 0
        for i, column in enumerate(columns):
            length = len(column.token_ids)
            if column.task in rows:
                arrays.append(rows[column.task][i])
            else:
                # Copied, because the next pass overwrites these states.
                hidden_LE = hidden_TE.narrow(0, first, length).to(torch.float32, copy=True)
                arrays.append(self._project(column.task)(hidden_LE).numpy())
            first += length
        return arrays

    def _project(self, task: str) -> Project:
        found = self._embed if task.endswith("embed") else self._classify
        # The task was checked when the request was rendered.
        assert found is not None
        return found

    def _load(self) -> None:
        config, spec, traits = self._config, self._spec, self._traits
        _check_expansion(spec, traits)
        folder, architecture = Path(config.model.path), config.model.architecture
        prefixes: tuple[str, ...] = ("model.",)
        head, eps = Head(out="score"), 0.0
        if isinstance(traits, EncoderTraits):
            prefixes, eps = traits.prefixes, traits.norm_eps
            head = traits.token_head if spec.tasks == ("token_classify",) else traits.head

        def tensors(dtype: torch.dtype) -> Tensors:
            task = traits.task if isinstance(traits, EncoderTraits) else None
            options = config.load_format, config.seed, task
            return Tensors(folder, prefixes, dtype, *options, is_gguf=config.model.is_gguf)

        # Heads are small, so they compute in float32 whatever the model's dtype.
        wide = tensors(torch.float32)
        if isinstance(traits, EncoderTraits):
            self._model = load_encoder(tensors(self._dtype), traits, config.max_model_len)
        else:
            self._model = UnpagedDecoder.load(config, traits)
        if self._images is not None:
            self._images.load()
        if spec.splade is not None:
            if not isinstance(traits, EncoderTraits):
                rule = "sparse embeddings (SpladePooling) of a decoder are not supported"
                raise UnsupportedFeatureError(rule, parameter="model")
            self._embed = load_splade(tensors(self._dtype), traits, spec.splade)
        elif "embed" in spec.tasks or "token_embed" in spec.tasks:
            self._embed = load_projection(
                wide, spec, architecture, traits.hidden_size, config.load_format
            )
        elif spec.token_classifier is not None:
            shape = (config.model.vocab_size, traits.hidden_size)
            tokenizer = Path(config.tokenizer or config.model.path)
            self._classify = load_token_classifier(wide, spec.token_classifier, shape, tokenizer)
        else:
            self._classify = load_head(wide, head, traits.hidden_size, len(spec.labels), eps)


def _image_encoder(
    config: EngineConfig, traits: EncoderTraits | DecoderTraits
) -> MediaEncoder | None:
    """Return the encoder of the images that the config's model takes, if it takes any.

    Raises:
        UnsupportedFeatureError: the text model has no positions in three dimensions, and its images need them.
    """
    media = config.media
    if media is None:
        return None
    ropes = () if isinstance(traits, EncoderTraits) else traits.ropes
    if media.family.has_grids and not (ropes and all(rope.sections for rope in ropes)):
        rule = f"images of {media.model_type} need mrope_section in config.json"
        raise UnsupportedFeatureError(f"{rule}; {ADVICE}", parameter="model")
    load = partial(load_tower, config, media)
    return MediaEncoder(load, media.encoder_cache_bytes, give_back_free_memory)


def _embeds(columns: Sequence[PoolEntry], rows: Mapping[bytes, Tensor]) -> list[tuple[int, Tensor]]:
    """Return the rows of all images, each run with the index of its first token in the pass."""
    found: list[tuple[int, Tensor]] = []
    place = 0
    for column in columns:
        for item in column.media:
            begin = 0
            for offset, length in item.runs:
                part = rows[item.key].narrow(0, begin, length)
                found.append((place + item.first + offset, part))
                begin += length
        place += len(column.token_ids)
    return found


def _axes(columns: Sequence[PoolEntry]) -> np.ndarray | None:
    """Return the positions [3, T] in time, height and width, or None if no image has them."""
    if all(item.grid is None for column in columns for item in column.media):
        return None
    parts: list[np.ndarray] = []
    for column in columns:
        positions = np.arange(len(column.token_ids))
        grids = [(x.first + x.runs[0][0], *x.grid) for x in column.media if x.grid is not None]
        parts.append(Axes.of(grids).at(positions) if grids else np.repeat(positions[None], 3, 0))
    return np.concatenate(parts, 1)


def slices(columns: Sequence[PoolEntry], num_threads: int) -> list[Sequence[PoolEntry]]:
    """Divide the entries, in order, into passes of about equally many tokens.

    A pass has about `SLICE_TOKENS` at most. Their number is a multiple of the threads if there are enough tokens.
    """
    total = sum(len(column.token_ids) for column in columns)
    num_passes = -(-total // SLICE_TOKENS)
    if total >= num_threads * LEAST_TOKENS:
        num_passes = -(-num_passes // num_threads) * num_threads
    parts: list[list[PoolEntry]] = [[] for _ in range(num_passes)]
    before = 0
    for column in columns:
        middle = before + len(column.token_ids) // 2
        parts[min(middle * num_passes // total, num_passes - 1)].append(column)
        before += len(column.token_ids)
    return [part for part in parts if part]


def _check_expansion(spec: PoolerSpec, traits: EncoderTraits | DecoderTraits) -> None:
    """Refuse a query expansion if its tokens could not see the whole text.

    Raises:
        UnsupportedFeatureError: an attention window or a causal mask hides a part of the text from them.
    """
    late = spec.late
    if late is None or not late.do_query_expansion or late.attend_to_expansion_tokens:
        return
    nearest = min((w for w in traits.windows if w is not None), default=late.query_length)
    if isinstance(traits, DecoderTraits) or late.query_length > nearest + 1:
        raise UnsupportedFeatureError(
            "query expansion whose tokens are not attended to, by a decoder or beyond an attention window"
        )


def _lone_threads(num: int) -> ThreadPoolExecutor:
    """Start threads that each compute without helpers.

    Waits until all have set their number of torch threads, because that number is global for a moment.
    """
    threads = ThreadPoolExecutor(num, "pooling", initializer=compute_with, initargs=(1, num))
    all_are_there = threading.Barrier(num, timeout=START_S)
    for there in [threads.submit(all_are_there.wait) for _ in range(num)]:
        there.result()
    return threads


def _groups(columns: Sequence[PoolEntry]) -> list[Group]:
    groups: list[Group] = []
    first = 0
    for (length, num_keys), same in groupby(columns, lambda c: (len(c.token_ids), c.num_keys)):
        num = len(list(same))
        groups.append(Group(first, num, length, num_keys or UNLIMITED))
        first += num * length
    return groups


def _type_ids(columns: Sequence[PoolEntry]) -> np.ndarray | None:
    if all(column.token_type_ids is None for column in columns):
        return None
    each = (column.token_type_ids or (0,) * len(column.token_ids) for column in columns)
    return np.array([*chain(*each)], np.int64)

"""Score pairs of texts, and run many pooling requests together.

`LLM.score`, `trouper score` and the server's score and rerank routes share this module. A score needs several
requests (embeddings of both texts, or a query cached in the Pooler for its documents). They are planned here, so that
each distinct text is computed only once.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import anyio.lowlevel
import anyio.to_thread
import msgspec
import numpy as np

from trouper.actors.engine.generation import Generation
from trouper.actors.output.pooler import MAX_QUERIES
from trouper.actors.output.postprocessing import cosines
from trouper.actors.runtime.event_loop import ITEMS_PER_TURN
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.errors import (
    TrouperValidationError,
    UnsupportedFeatureError,
    invalid,
    prompt_named,
)
from trouper.inputs import ChatPrompt, PairPrompt, PoolingPrompt
from trouper.outputs import Array, PoolingOutput, PoolingRequestOutput
from trouper.pooling import LateInteractionParams, PoolingParams

PoolingGeneration = Generation[PoolingRequestOutput[PoolingOutput]]
Pooled = PoolingRequestOutput[PoolingOutput]
Encode = Callable[..., PoolingGeneration]
Run = Callable[[Iterable[PoolingGeneration], Any, Sequence[str]], Awaitable[list[Pooled]]]
T = TypeVar("T")
NO_IMAGES_IN_PAIRS = "cross-encoders compare texts only; use the task classify on messages that contain the pair, or an embedding model"


class MixedContent:
    """One side of a pair with images, as the parts of a message.

    Only one and the same object is computed once; objects with equal parts are computed separately.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return f"<MixedContent of {len(self.parts)} parts>"

    @property
    def prompt(self) -> ChatPrompt:
        """Return the prompt in which the chat template places the parts."""
        return {"messages": [{"role": "user", "content": [*self.parts]}]}


Side = str | MixedContent
# The caller's names of the queries and of the documents, such as `data_1[3]`, for errors.
Places = tuple[Sequence[str], Sequence[str]]
# The maximum number of tokens of each text of a prompt; an empty tuple sets no maximum.
Most = tuple[int | None, ...]
# The Pooler keeps at most MAX_QUERIES; this leaves room for three other scores at the same time.
QUERIES_AT_ONCE = MAX_QUERIES // 4


async def collect(
    encodings: Iterable[PoolingGeneration], bar: Any = None, places: Sequence[str] | None = None
) -> list[Pooled]:
    """Run all requests together and return their outputs in order; the first error aborts the others.

    Args:
        bar: progress bar, updated by one for each finished request.
        places: the caller's names of the prompts; an error then names the prompt that caused it.
    """
    opened: list[PoolingGeneration] = []
    outputs: list[Pooled] = []
    try:
        await anyio.lowlevel.checkpoint()
        for encoding in encodings:
            opened.append(encoding)
            encoding.open()
            if len(opened) % ITEMS_PER_TURN == 0:
                await anyio.lowlevel.checkpoint()
        for i, encoding in enumerate(opened):
            with nullcontext() if places is None else prompt_named(places[i]):
                outputs.extend([output async for output in encoding])
            if bar is not None:
                bar.update(1)
    finally:
        for encoding in opened:
            encoding.close()
    return outputs


class Scorer:
    """Scores pairs with the method that the model supports: cross-encoder, bi-encoder or late interaction.

    A cross-encoder reads both texts in one prompt.  A bi-encoder compares one embedding of each text, and late
    interaction compares the embeddings of their tokens.
    """

    def __init__(
        self,
        encode: Encode,
        spec: PoolerSpec | None,
        params: PoolingParams | None = None,
        *,
        name: str | None = None,
        run: Run | None = None,
        max_tokens_per_query: int | None = None,
        max_tokens_per_doc: int | None = None,
        places: Places | None = None,
    ) -> None:
        """Prepare scoring with one engine; nothing is computed yet.

        Args:
            encode: creates one pooling request; has the signature of `AsyncLLMEngine.encode`.
            spec: how the model pools; None if it generates text.
            params: pooling parameters of all requests; None means the model's defaults.
            name: prefix of the request ids; without it the engine generates them.
            options: `tokenization_kwargs` of all requests.
            run: replaces `collect`, for callers that watch for disconnects while they wait.
            max_tokens_per_query, max_tokens_per_doc: truncate each text to this many tokens, without special tokens.
            places: the caller's names of the queries and the documents, for errors; by default `prompt`.
        """
        self._collect = run or collect
        self._encode = encode
        self._spec = spec
        self._params = params or PoolingParams()
        self._name = name
        self._most = (max_tokens_per_query, max_tokens_per_doc)
        self._places = places
        self._num_requests = 0

    async def score(
        self, queries: Sequence[Side], documents: Sequence[Side], bar: Any = None
    ) -> list[Pooled]:
        """Return one score for each pair `(queries[i], documents[i])`; both lists must have the same length.

        Raises:
            TrouperValidationError: the model cannot score, or a text is invalid.
        """
        match score_kind(self._spec):
            case "classify":
                names = self._names_of(1, len(documents))
                for side, texts in enumerate((queries, documents)):
                    if "" in texts:
                        place = self._names_of(side, len(texts))[texts.index("")]
                        raise invalid(place, "must not be empty")
                    for text, place in zip(texts, self._names_of(side, len(texts)), strict=True):
                        if isinstance(text, MixedContent):
                            raise UnsupportedFeatureError(
                                f"{place}: {NO_IMAGES_IN_PAIRS}", parameter=place
                            )
                pairs = [
                    PairPrompt(prompt=cast("str", query), text_pair=cast("str", document))
                    for query, document in zip(queries, documents, strict=True)
                ]
                most = () if self._most == (None, None) else self._most
                return await self._run(pairs, "classify", [most] * len(pairs), names, bar=bar)
            case kind:
                self._check_most(queries, documents)
                compare = self._bi_encode if kind == "embed" else self._interact
                return await compare(queries, documents, bar)

    async def _run(
        self,
        prompts: Sequence[PoolingPrompt | MixedContent],
        task: str,
        most: Sequence[Most],
        places: Sequence[str],
        late: Sequence[LateInteractionParams] | None = None,
        bar: Any = None,
    ) -> list[Pooled]:
        params = msgspec.structs.replace(self._params, task=task)
        return await self._collect(
            (
                self._encode(
                    prompt.prompt if isinstance(prompt, MixedContent) else prompt,
                    msgspec.structs.replace(params, late_interaction_params=late[i])
                    if late
                    else params,
                    self._next_id(),
                    max_text_tokens=most[i],
                )
                for i, prompt in enumerate(prompts)
            ),
            bar,
            places,
        )

    async def _bi_encode(
        self, queries: Sequence[Side], documents: Sequence[Side], bar: Any
    ) -> list[Pooled]:
        query_most, document_most = map(_alone, self._most)
        asked = [(q, query_most) for q in queries] + [(d, document_most) for d in documents]
        num = len(queries)
        names = (*self._names_of(0, num), *self._names_of(1, num))
        distinct: dict[tuple[Side, Most], str] = {}
        for each, place in zip(asked, names, strict=True):
            # A text with the same truncation is embedded only once.
            distinct.setdefault(each, place)
        outputs = await self._run(
            [text for text, _ in distinct],
            "embed",
            [most for _, most in distinct],
            list(distinct.values()),
            bar=bar,
        )
        found = dict(zip(distinct, outputs, strict=True))
        pairs = [(found[q], found[d]) for q, d in zip(asked[:num], asked[num:], strict=True)]
        arrays = await anyio.to_thread.run_sync(_cosines, pairs, limiter=anyio.CapacityLimiter(1))
        return await _joined((*pair, array) for pair, array in zip(pairs, arrays, strict=True))

    async def _interact(
        self, queries: Sequence[Side], documents: Sequence[Side], bar: Any
    ) -> list[Pooled]:
        """Score by late interaction, in groups of queries, because the Pooler keeps a limited number of them."""
        uses: dict[Side, list[int]] = {}
        for i, query in enumerate(queries):
            uses.setdefault(query, []).append(i)
        distinct = list(uses)
        found: dict[int, Pooled] = {}
        for begin in range(0, len(distinct), QUERIES_AT_ONCE):
            group = {query: uses[query] for query in distinct[begin : begin + QUERIES_AT_ONCE]}
            found |= await self._interact_with(group, documents, bar)
        return [found[i] for i in range(len(queries))]

    async def _interact_with(
        self, uses: dict[Side, list[int]], documents: Sequence[Side], bar: Any
    ) -> dict[int, Pooled]:
        """Score one group of queries with their documents.

        The Pooler keeps the token embeddings of each query until it has scored as many documents as announced.
        """
        keep: list[LateInteractionParams] = []
        meet: list[LateInteractionParams] = []
        for own in uses.values():
            num_uses, key = len(own), f"{id(self)}-{own[0]}"
            keep.append(
                LateInteractionParams(mode="cache_query", query_key=key, query_uses=num_uses)
            )
            meet += [LateInteractionParams(mode="score_doc", query_key=key)] * num_uses
        query_most, document_most = map(_alone, self._most)
        query_names = self._names_of(0, len(documents))
        names = [query_names[own[0]] for own in uses.values()]
        first = await self._run(list(uses), "token_embed", [query_most] * len(uses), names, keep)
        met = [(query, i) for query, own in zip(first, uses.values(), strict=True) for i in own]
        document_names = self._names_of(1, len(documents))
        second = await self._run(
            [documents[i] for _, i in met],
            "token_embed",
            [document_most] * len(met),
            [document_names[i] for _, i in met],
            meet,
            bar,
        )
        joined = await _joined(
            (query, output, output.outputs.array)
            for (query, _), output in zip(met, second, strict=True)
        )
        return {i: output for (_, i), output in zip(met, joined, strict=True)}

    def _check_most(self, *sides: Sequence[Side]) -> None:
        """Refuse to truncate contents: the tokens of their images must stay whole."""
        for side, (most, given) in enumerate(zip(self._most, sides, strict=True)):
            if most is None:
                continue
            for each, place in zip(given, self._names_of(side, len(given)), strict=True):
                if isinstance(each, MixedContent):
                    name = ("max_tokens_per_query", "max_tokens_per_doc")[side]
                    raise invalid(name, f"truncates texts only, but {place} contains images", most)

    def _names_of(self, side: int, num: int) -> Sequence[str]:
        """Return the caller's names of the queries (`side` 0) or of the documents (`side` 1)."""
        return ["prompt"] * num if self._places is None else self._places[side]

    def _next_id(self) -> str | None:
        self._num_requests += 1
        return None if self._name is None else f"{self._name}-{self._num_requests - 1}"


def _alone(most: int | None) -> Most:
    return () if most is None else (most,)


def score_kind(spec: PoolerSpec | None) -> str:
    """Return the task that the model's scores need: `classify`, `embed` or `token_embed`.

    Raises TrouperValidationError if the model cannot score.
    """
    if spec is not None and (spec.task in ("embed", "token_embed") or len(spec.labels) == 1):
        return spec.task
    found = (
        "this model generates text"
        if spec is None
        else f"the task of this model is {spec.task}, with {len(spec.labels)} labels"
    )
    raise TrouperValidationError(
        f"score needs an embedding model or a classifier with one label; {found}",
        parameter="task",
    )


def as_pairs(
    first: Any, second: Any, names: tuple[str, str]
) -> tuple[list[Side], list[Side], Places]:
    """Pair texts or contents 1 with 1, 1 with N, or N with N; return two lists of equal length and the names of all texts.

    Raises:
        TrouperValidationError: a side is empty, or the lengths do not match.
    """
    (one, one_places), (two, two_places) = (
        _listed(side, name) for side, name in zip((first, second), names, strict=True)
    )
    if len(one) not in (1, len(two)):
        raise TrouperValidationError(
            f"cannot pair {len(one)} with {len(two)} texts: give 1 and N, or N and N",
            parameter=names[1],
        )
    times = len(two) if len(one) == 1 else 1
    return one * times, two, (one_places * times, two_places)


def _listed(side: Any, name: str) -> tuple[list[Side], list[str]]:
    """Return the texts and contents of one side of the pairs as a list, with a name for each."""
    if isinstance(side, Sequence) and not isinstance(side, str):
        texts = list(cast("Sequence[Any]", side))
        places = [f"{name}[{i}]" for i in range(len(texts))]
    else:
        texts, places = [side], [name]
    if not texts:
        raise invalid(name, "must not be empty")
    return [_side(text, place) for text, place in zip(texts, places, strict=True)], places


def _side(given: Any, place: str) -> Side:
    if isinstance(given, str | MixedContent):
        return given
    if isinstance(given, Mapping):
        fields = cast("Mapping[str, Any]", given)
        parts = fields.get("content")
        if set(fields) == {"content"} and isinstance(parts, list | tuple) and parts:
            return MixedContent(cast("Sequence[Any]", parts))
        raise invalid(place, "must be text, or a dict with content, a list of parts")
    raise invalid(place, "must be text", given)


def _cosines(pairs: Sequence[tuple[Pooled, Pooled]]) -> list[Array]:
    sides = [
        np.stack([output.outputs.array for output in side]) for side in zip(*pairs, strict=True)
    ]
    return [np.array(value) for value in cosines(*sides)]


async def _joined(scores: Iterable[tuple[Pooled, Pooled, Array]]) -> list[Pooled]:
    """Return the score of each pair as one output, with the tokens and the error of both texts."""
    outputs: list[Pooled] = []
    for query, document, array in scores:
        output = PoolingRequestOutput(
            request_id=document.request_id,
            outputs=PoolingOutput(array),
            prompt_token_ids=query.prompt_token_ids + document.prompt_token_ids,
            error=query.error or document.error,
            metrics=document.metrics,
        )
        outputs.append(output)
        if len(outputs) % ITEMS_PER_TURN == 0:
            await anyio.lowlevel.checkpoint()
    return outputs

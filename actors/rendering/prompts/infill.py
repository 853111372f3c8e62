"""Fill in the middle: encode a prefix and a suffix for a model trained to write the text between them.  Pure.

    [repo] project ⏎ [file] name ⏎ text … [file] name ⏎ [prefix] text [suffix] text [middle] start of the middle

The marks are special tokens, found by the names that families of models use.  Other files come before the prefix; in a
model without a mark for files, a line of dashes separates them.  Text of the caller never becomes a mark.
Source: Bavarian et al. 2022; the layout of llama.cpp's `/infill`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from trouper.actors.rendering.token_stream import pieces_of
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.errors import TrouperValidationError, invalid

# prefix, suffix, middle; for each family: Qwen and CodeGemma, StarCoder, Granite, DeepSeek, Code Llama, GLM
FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
REPO = ("<|repo_name|>", "<|fim_repo|>", "<reponame>", "<repo_name>", "<fim-repo>", "<REPO>")
FILE = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
# That end a middle beside the model's own.
ENDS = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "▁<EOT>", "<EOT>", *REPO, *FILE)
SNIPPET = "\n\n--- snippet ---\n\n"  # before a file where there is no mark for one
PROJECT, FILENAME = "myproject\n", "filename\n"
MAX_FILES = 256
SPARE_TOKENS = (
    64  # a text that is cut before tokenising is left this much longer than it needs to be
)
KEYS = frozenset({"suffix", "middle", "files", "max_prompt_tokens"})
NO_MARKS = "this model's tokenizer has no tokens for filling in the middle"


class InfillMarks(NamedTuple):
    """The tokens of one tokenizer that mark the parts.

    `repo` and `file` are None if the model was not trained on several files.
    """

    prefix: int
    suffix: int
    middle: int
    repo: int | None
    file: int | None
    ends: tuple[int, ...]


class Gap(msgspec.Struct, frozen=True):
    """A gap to be filled, as callers describe it.

    Attributes:
        prefix, suffix: the texts on either side.
        middle: what the filling begins with.
        files: names and texts of other files, the nearest last.
        max_tokens: of the prompt; beyond it, the text farthest from the gap is dropped.  None drops nothing.
    """

    prefix: str
    suffix: str
    middle: str = ""
    files: tuple[tuple[str, str], ...] = ()
    max_tokens: int | None = None

    @classmethod
    def of(cls, prompt: Mapping[str, Any]) -> "Gap":
        """Read a prompt dict.

        Raises:
            TrouperValidationError: naming the key.
        """
        texts: dict[str, str] = {}
        for key in ("prompt", "suffix", "middle"):
            value = prompt.get(key, "")
            if not isinstance(value, str):
                raise invalid(key, "must be text", type(value).__name__)
            texts[key] = value
        limit = prompt.get("max_prompt_tokens")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
            raise invalid("max_prompt_tokens", "must be an integer", limit)
        if limit is not None and limit < 1:
            raise invalid("max_prompt_tokens", "must be at least 1", limit)
        files = tuple(_files(prompt.get("files") or ()))
        return cls(texts["prompt"], texts["suffix"], texts["middle"], files, limit)

    @property
    def num_chars(self) -> int:
        files = sum(len(name) + len(text) for name, text in self.files)
        return len(self.prefix) + len(self.suffix) + len(self.middle) + files


def marks_of(tokenizer: Tokenizer) -> InfillMarks:
    """Find the marks of a tokenizer.

    Raises:
        TrouperValidationError: it has none.
    """
    for names in FAMILIES:
        ids = [tokenizer.token_id(name) for name in names]
        if None not in ids:
            prefix, suffix, middle = cast("list[int]", ids)
            ends = {tokenizer.token_id(name) for name in ENDS} - {None}
            repo, file = _first(tokenizer, REPO), _first(tokenizer, FILE)
            return InfillMarks(
                prefix, suffix, middle, repo, file, tuple(sorted(cast("set[int]", ends)))
            )
    raise invalid("suffix", NO_MARKS)


def gap_ids(
    gap: Gap, marks: InfillMarks, tokenizer: Tokenizer, control: Collection[str], *, adds_bos: bool
) -> list[int]:
    """Return the prompt's tokens.

    Args:
        control: texts of the control tokens, which are none where a text spells them.
        adds_bos: the prompt begins with the tokenizer's BOS, if it puts one before texts.

    Raises:
        TrouperValidationError: a text is not Unicode, or the middle without any context leaves no room.
    """

    def encoded(text: str) -> list[int]:
        return tokenizer.encode_pieces(pieces_of(text, control), continues=True) if text else []

    bos = tokenizer.encode("")[:1] if adds_bos else []
    bos = bos if bos == [tokenizer.bos_token_id] else []
    limit, longest = gap.max_tokens, tokenizer.longest_token_chars
    if limit is not None and len(gap.middle) > limit * longest:
        raise TrouperValidationError(
            f"middle: its {len(gap.middle)} characters leave no room in {limit} tokens",
            parameter="middle",
        )
    middle = [marks.middle, *encoded(gap.middle)]
    if limit is None:
        prefix, suffix = encoded(gap.prefix), encoded(gap.suffix)
        num_left = None
    else:
        room = limit - len(bos) - len(middle) - 2
        if room < 0:
            raise TrouperValidationError(
                f"middle: its {len(middle) - 1} tokens leave no room in {limit}", parameter="middle"
            )
        keep = (room + SPARE_TOKENS) * longest
        prefix, suffix = encoded(gap.prefix[-keep:]), encoded(gap.suffix[:keep])
        num_prefix, num_suffix = _shares(len(prefix), len(suffix), room)
        prefix, suffix = prefix[len(prefix) - num_prefix :], suffix[:num_suffix]
        num_left = room - num_prefix - num_suffix
    context = _context(gap, marks, encoded, num_left, longest)
    return [*bos, *context, marks.prefix, *prefix, marks.suffix, *suffix, *middle]


def _context(
    gap: Gap, marks: InfillMarks, encoded: Any, num_left: int | None, longest: int
) -> list[int]:
    """Return the tokens of the files around the gap: as many whole ones, from the nearest on, as there is room for."""
    if not gap.files:
        return []
    begin = [] if marks.repo is None else [marks.repo, *encoded(PROJECT)]
    end = [] if marks.file is None else [marks.file, *encoded(FILENAME)]
    num_tokens = len(begin) + len(end)
    found: list[list[int]] = []
    for name, text in reversed(gap.files):
        size = len(name) + len(text)
        if num_left is not None and size > (num_left - num_tokens) * longest:
            break  # it cannot fit, and is not tokenised
        head = encoded(SNIPPET) if marks.file is None else [marks.file, *encoded(f"{name}\n")]
        ids = [*head, *encoded(text)]
        num_tokens += len(ids)
        if num_left is not None and num_tokens > num_left:
            break
        found.append(ids)
    if not found:
        return []
    return [*begin, *(id for ids in reversed(found) for id in ids), *end]


def _shares(num_prefix: int, num_suffix: int, room: int) -> tuple[int, int]:
    """Divide the room: a quarter is the suffix's, the rest the prefix's, and what one leaves the other may have."""
    num_suffix = min(num_suffix, max(room // 4, room - num_prefix))
    return min(num_prefix, room - num_suffix), num_suffix


def _files(given: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise invalid("files", "must be a list of files", type(given).__name__)
    files = cast("Sequence[Any]", given)
    if len(files) > MAX_FILES:
        raise invalid("files", f"at most {MAX_FILES} files", len(files))
    for i, each in enumerate(files):
        fields = cast("Any", each if isinstance(each, Mapping) else {})
        name, text = fields.get("filename", "tmp"), fields.get("text")
        if not isinstance(name, str) or not isinstance(text, str):
            raise invalid(f"files[{i}]", "must have a text, and a filename that is text")
        yield name, text


def _first(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    ids = (tokenizer.token_id(name) for name in names)
    return next((id for id in ids if id is not None), None)

"""The compiled grammars of one model: its vocabulary as `llguidance` reads it, and the grammars that were asked for last.

Used in the renderers' threads.  The compiler counts its steps, so it needs no deadline and no process of its own; what it
refuses is the error of the request that brought it.
"""

import hashlib
import json
from collections import OrderedDict
from threading import Lock
from typing import Any

import msgspec

from trouper.actors.messages.thinking import Thinking
from trouper.actors.rendering.grammar import TOO_COMPLEX, failure, grammar_source, refused
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.output_rules import StructuredOutputsConfig
from trouper.errors import UnsupportedFeatureError
from trouper.extras import install_hint
from trouper.params import SamplingParams
from trouper.structured_outputs import StructuredOutputsParams

MAX_COMPILED = 256  # grammars, of some 10 KiB; a large one takes a megabyte
# Steps of the lexer's construction (10 ms), of a mask's, its states, and symbols of a grammar.
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
TURNED_OFF = "this engine takes no grammars (structured_outputs_config)"


class CompiledGrammar:
    """`Grammar` of a request: a prototype that no sequence changes, and how the request wants its end.

    Without a prototype all that is asked of an output is the end of its reasoning.
    """

    def __init__(
        self,
        prototype: Any,
        eos_token_ids: tuple[int, ...],
        num_tokens: int,
        thinking: Thinking | None,
        *,
        ignore_eos: bool,
    ) -> None:
        self._prototype = prototype
        self.thinking = thinking
        self.eos_token_ids, self.num_tokens = eos_token_ids, num_tokens
        self.ignore_eos = ignore_eos

    def matcher(self) -> Any:
        """Copy the prototype, if there is one."""
        return None if self._prototype is None else self._prototype.deep_copy()


class Grammars:
    """Compiles grammars for one vocabulary.  Threads share it.

    Args:
        tokenizer: None = there is none, and no request gets this far with a grammar.
        vocab_size: of the model's logits.
        eos_token_ids: that end an output.
        takes_grammars: the device is in this process; a matcher does not cross to another.
        config: what holds where a request says nothing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        takes_grammars: bool = True,
        config: StructuredOutputsConfig = StructuredOutputsConfig(),  # noqa: B008  # it is frozen
    ) -> None:
        self._takes_grammars = takes_grammars
        self._config = config
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(token for token in eos_token_ids if token < vocab_size)
        self._num_tokens = vocab_size
        self._lock = Lock()
        self._vocabulary: Any = None  # made at the first use
        self._prototypes: OrderedDict[bytes, Any] = (
            OrderedDict()
        )  # by digest, the last used at the end

    def compile(
        self, params: SamplingParams, thinking: Thinking | None = None
    ) -> CompiledGrammar | None:
        """Compile what the output of a request must match; None: it may be anything.

        Args:
            thinking: reasoning that may come first.

        Raises:
            GrammarError: it is no grammar, or too complex.
            UnsupportedFeatureError: llguidance is not installed, or grammars are turned off.
        """
        wanted = params.structured_outputs
        if (wanted is None and thinking is None) or self._tokenizer is None:
            return None
        name = "structured_outputs" if wanted is not None else "thinking_token_budget"
        if not self._takes_grammars:
            raise UnsupportedFeatureError(
                f"{name} needs a device in this process: --device-worker inline", parameter=name
            )
        if (
            wanted is not None
            and self._config.enable_in_reasoning
            and params.thinking_token_budget is None
        ):
            thinking = None
        return CompiledGrammar(
            None if wanted is None else self._compiled(wanted, self._tokenizer),
            self._eos_token_ids,
            self._num_tokens,
            thinking,
            ignore_eos=params.ignore_eos,
        )

    def _compiled(self, wanted: StructuredOutputsParams, tokenizer: Tokenizer) -> Any:
        if self._config.backend == "none":
            raise UnsupportedFeatureError(TURNED_OFF, parameter="structured_outputs")
        wanted = _with_defaults(wanted, self._config)
        try:
            return self._prototype(wanted, tokenizer)
        except ImportError as error:
            raise UnsupportedFeatureError(
                f"structured outputs need llguidance: {install_hint('grammar')}",
                parameter="structured_outputs",
            ) from error
        except UnicodeError:
            raise failure("not valid Unicode (a lone surrogate)", wanted.kind) from None
        except RecursionError:
            raise refused(wanted.kind, "nested too deep", TOO_COMPLEX) from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of the library: no Exception
                raise
            raise failure("the compiler failed", wanted.kind) from error  # noqa: ASYNC104  # a panic

    def _prototype(self, wanted: StructuredOutputsParams, tokenizer: Tokenizer) -> Any:
        import llguidance

        source = grammar_source(wanted)
        digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary(tokenizer)
            found = self._prototypes.get(digest)
            if found is not None:
                self._prototypes.move_to_end(digest)
                return found
        options: dict[str, Any] = dict(LIMITS)
        limits: Any = llguidance.LLParserLimits(**options)
        try:
            found = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        except (ValueError, UnicodeError) as error:
            raise failure(str(error), wanted.kind) from None
        if found.is_error():
            raise failure(found.get_error(), wanted.kind)
        with self._lock:
            self._prototypes[digest] = found
            if len(self._prototypes) > MAX_COMPILED:
                self._prototypes.popitem(last=False)
        return found

    def _make_vocabulary(self, tokenizer: Tokenizer) -> Any:
        """Read the vocabulary without its added tokens that are not special: a text that spells one would mask to that
        token alone, and the matcher would then refuse it.
        """
        import llguidance

        rules = json.loads(tokenizer.to_json())
        rules["added_tokens"] = [t for t in rules.get("added_tokens", ()) if t["special"]]
        self._num_tokens = max(self._num_tokens, tokenizer.max_id + 1)
        return llguidance.LLTokenizer(
            json.dumps(rules), n_vocab=self._num_tokens, eos_token=list(self._eos_token_ids)
        )


def _with_defaults(
    wanted: StructuredOutputsParams, config: StructuredOutputsConfig
) -> StructuredOutputsParams:
    """Turn on what the engine's options turn on for every request."""
    given = {
        name: True
        for name in ("disable_any_whitespace", "disable_additional_properties")
        if getattr(config, name)
    }
    return msgspec.structs.replace(wanted, **given) if given else wanted

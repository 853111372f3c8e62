"""The requests that both servers get, as rows."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "ignore_eos": True}
HELLO = [{"role": "user", "content": "Hello"}]
LONG = "word " * 3000  # beyond the model's length


class Case(NamedTuple):
    """One request: the model's name is added to an object without one."""

    name: str
    method: str
    path: str
    body: Any = None
    offenders: Sequence[str] = ()  # words of the request that the message of an error may name
    headers: Mapping[str, str] = MappingProxyType({})
    kind: str = "generate"  # of the model: generate or pooling


def completion(name: str, offenders: Sequence[str] = (), **fields: Any) -> Case:
    body = {"prompt": "def f(x):", "max_tokens": 5, **GREEDY, **fields}
    return Case(f"completion: {name}", "POST", COMPLETIONS, body, offenders)


def chat(name: str, offenders: Sequence[str] = (), **fields: Any) -> Case:
    body = {"messages": HELLO, "max_tokens": 5, **GREEDY, **fields}
    return Case(f"chat: {name}", "POST", CHAT, body, offenders)


def generating(make: Any) -> list[Case]:
    """Return the requests that completions and chats share."""
    stream = {"stream": True}
    usage = {"include_usage": True}
    return [
        make("plain"),
        make("n = 2", n=2, temperature=1, seed=1),
        make("stream", **stream),
        make("stream with n = 2", n=2, temperature=1, seed=1, **stream),
        make("stream with usage", stream_options=usage, **stream),
        make("stream with continuous usage", stream_options={**usage, "continuous_usage_stats": True}, **stream),
        make("stream with continuous usage alone", stream_options={"continuous_usage_stats": True}, **stream),
        make("token ids", return_token_ids=True),
        make("token ids in a stream", return_token_ids=True, **stream),
        make("prompt logprobs", prompt_logprobs=1),
        make("prompt logprobs of the prompt's tokens alone", prompt_logprobs=0),
        make("a stop string", stop=["z", "e", "a", " "], max_tokens=50),
        make("a seed", seed=7, temperature=1),
        make("beam search", use_beam_search=True, n=2, ignore_eos=False),
        make("beam search in a stream", use_beam_search=True, n=2, ignore_eos=False, **stream),
        make("logit bias", logit_bias={"50": 100}),
        make("choices by structured outputs", structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False),
        make("a JSON object", response_format={"type": "json_object"}, max_tokens=8, ignore_eos=False),
        make("an id", request_id="mine"),
        make("an unknown field", nonsense=1),
        make("a priority of an engine by order of arrival", priority=1),
        # mistakes
        make("wrong: temperature", ["temperature", "-1"], temperature=-1),
        make("wrong: top_p", ["top_p", "2"], top_p=2),
        make("wrong: top_k", ["top_k", "-2"], top_k=-2),
        make("wrong: min_p", ["min_p", "3"], min_p=3),
        make("wrong: n", ["n", "0"], n=0),
        make("wrong: max_tokens", ["max_tokens", "-5"], max_tokens=-5),
        make("wrong: too many tokens", ["max_tokens", "5000", "1024"], max_tokens=5000),
        make("wrong: repetition_penalty", ["repetition_penalty", "0"], repetition_penalty=0),
        make("wrong: presence_penalty", ["presence_penalty", "3"], presence_penalty=3),
        make("wrong: frequency_penalty", ["frequency_penalty", "-3"], frequency_penalty=-3),
        make("wrong: min_tokens", ["min_tokens", "max_tokens", "9"], min_tokens=9),
        make("wrong: stop token ids", ["stop_token_ids", "x"], stop_token_ids=["x"]),
        make("wrong: key of logit bias", ["logit_bias", "abc"], logit_bias={"abc": 1}),
        make("wrong: id of logit bias", ["logit_bias", "99999"], logit_bias={"99999": 1}),
        make("wrong: allowed ids", ["allowed_token_ids", "99999"], allowed_token_ids=[99999]),
        make("wrong: no allowed ids", ["allowed_token_ids"], allowed_token_ids=[]),
        make("wrong: empty bad word", ["bad_words"], bad_words=[""]),
        make("wrong: prompt logprobs", ["prompt_logprobs", "-3"], prompt_logprobs=-3),
        make("wrong: prompt logprobs in a stream", ["prompt_logprobs", "stream"], prompt_logprobs=1, **stream),
        make("wrong: stream options without a stream", ["stream_options", "stream"], stream_options=usage),
        make("wrong: truncation", ["truncate_prompt_tokens", "5000"], truncate_prompt_tokens=5000),
        make("wrong: a regex", ["regex"], structured_outputs={"regex": "(("}),
        make("wrong: two constraints", ["structured_outputs"], structured_outputs={"regex": "a", "choice": ["a"]}),
        make("wrong: response format", ["response_format"], response_format={"type": "nonsense"}),
        make("wrong: type of a field", ["temperature"], temperature="hot"),
    ]  # fmt: skip


COMPLETION_CASES = [
    *generating(completion),
    completion("several prompts", prompt=["def f(x):", "import os"]),
    completion("several prompts in a stream", prompt=["def f(x):", "import os"], stream=True),
    completion("ids", prompt=[5, 6, 7]),
    completion("lists of ids", prompt=[[5, 6, 7], [8, 9]]),
    completion("logprobs = 0", logprobs=0),
    completion("logprobs", logprobs=2),
    completion("logprobs in a stream", logprobs=2, stream=True),
    completion("logprobs by ids", logprobs=1, return_tokens_as_token_ids=True),
    completion("echo", echo=True),
    completion("echo in a stream", echo=True, stream=True),
    completion("echo of ids", prompt=[5, 6, 7], echo=True),
    completion("echo with logprobs", echo=True, logprobs=2),
    completion("echo with logprobs = 0", echo=True, logprobs=0),
    completion("echo with logprobs in a stream", echo=True, logprobs=1, stream=True),
    completion("echo of the prompt alone", echo=True, logprobs=1, max_tokens=0),
    completion("echo of the prompt alone without logprobs", echo=True, max_tokens=0),
    completion("echo with token ids", echo=True, return_token_ids=True),
    completion("prompt_embeds of an empty list", prompt_embeds=[]),
    completion("truncated", prompt="def f(x): return x", truncate_prompt_tokens=3),
    completion("wrong: max_tokens = 0", ["max_tokens", "0"], max_tokens=0),
    completion("wrong: no prompt", ["prompt"], prompt=None),
    completion("wrong: an empty prompt", ["prompt"], prompt=""),
    completion("wrong: no prompts", ["prompt"], prompt=[]),
    completion("wrong: an id beyond the vocabulary", ["99999", "vocabulary"], prompt=[5, 99999]),
    completion("wrong: a negative id", ["-1"], prompt=[5, -1]),
    completion("wrong: a long prompt", ["1024", "reduce the length of the input prompt"], prompt=LONG),
    completion("wrong: a long prompt of ids", ["1024", "2000", "reduce the length of the input prompt"], prompt=[5] * 2000),
    completion("wrong: logprobs", ["logprobs", "-3"], logprobs=-3),
    completion("wrong: too many logprobs", ["logprobs", "50", "20"], logprobs=50),
    completion("wrong: suffix", ["suffix"], suffix="return x"),
    completion("wrong: mixed prompts", ["prompt"], prompt=["a", 5]),
]  # fmt: skip

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

CHAT_CASES = [
    *generating(chat),
    chat("logprobs", logprobs=True),
    chat("logprobs = 0", logprobs=True, top_logprobs=0),
    chat("top logprobs", logprobs=True, top_logprobs=2),
    chat("logprobs in a stream", logprobs=True, top_logprobs=2, stream=True),
    chat("logprobs by ids", logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True),
    chat("max_completion_tokens", max_completion_tokens=3),
    chat("parts", messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]),
    chat("a system's message", messages=[{"role": "system", "content": "Be brief."}, *HELLO]),
    chat("developer", messages=[{"role": "developer", "content": "Be brief."}, *HELLO]),
    chat("an answer that goes on", messages=[*HELLO, {"role": "assistant", "content": "I"}], add_generation_prompt=False, continue_final_message=True),
    chat("echo of an answer that goes on", messages=[*HELLO, {"role": "assistant", "content": "I"}], add_generation_prompt=False, continue_final_message=True, echo=True),
    chat("tools with no choice", tools=[TOOL], tool_choice="none"),
    chat("wrong: no messages", ["messages"], messages=[]),
    chat("wrong: messages missing", ["messages"], messages=None),
    chat("wrong: a message without a role", ["role"], messages=[{"content": "a"}]),
    chat("wrong: an unknown part", ["nonsense"], messages=[{"role": "user", "content": [{"type": "nonsense"}]}]),
    chat("wrong: an image for a model of text", [], messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]),
    chat("wrong: top_logprobs without logprobs", ["top_logprobs", "logprobs"], top_logprobs=2),
    chat("wrong: too many top_logprobs", ["50", "20"], logprobs=True, top_logprobs=50),
    chat("wrong: negative top_logprobs", ["top_logprobs"], logprobs=True, top_logprobs=-3),
    chat("wrong: both ways to end a prompt", ["continue_final_message", "add_generation_prompt"], add_generation_prompt=True, continue_final_message=True),
    chat("wrong: a choice without tools", ["tool_choice", "tools"], tool_choice="auto"),
    chat("wrong: a long prompt", ["1024", "reduce the length of the input prompt"], messages=[{"role": "user", "content": LONG}]),
    chat("wrong: a template from the client", ["chat_template"], chat_template="{{ messages }}"),
]  # fmt: skip

BATCH = {"messages": [HELLO, HELLO], "max_tokens": 4, **GREEDY}
OTHER_CASES = [
    Case("models", "GET", "/v1/models"),
    Case("health", "GET", "/health"),
    Case("ping", "GET", "/ping"),
    Case("version", "GET", "/version"),
    Case("load", "GET", "/load"),
    Case("tokenizer info", "GET", "/tokenizer_info"),
    Case("tokenize", "POST", "/tokenize", {"prompt": "def f(x):"}),
    Case("tokenize: strings", "POST", "/tokenize", {"prompt": "What is it?\n", "return_token_strs": True}),
    Case("tokenize: a chat", "POST", "/tokenize", {"messages": HELLO}),
    Case("tokenize: nothing", "POST", "/tokenize", {}),
    Case("detokenize", "POST", "/detokenize", {"tokens": [5, 6, 7]}),
    Case("detokenize: an id beyond the vocabulary", "POST", "/detokenize", {"tokens": [99999]}, ["99999"]),
    Case("invocations: a completion", "POST", "/invocations", {"prompt": "a", "max_tokens": 3, **GREEDY}),
    Case("invocations: a chat", "POST", "/invocations", {"messages": HELLO, "max_tokens": 3, **GREEDY}),
    Case("invocations: nonsense", "POST", "/invocations", {"nonsense": 1}),
    Case("batch of chats", "POST", "/v1/chat/completions/batch", BATCH),
    Case("batch of chats: a stream", "POST", "/v1/chat/completions/batch", {**BATCH, "stream": True}, ["stream"]),
    Case("unknown route", "GET", "/v1/nonsense"),
    Case("method", "GET", COMPLETIONS),
    Case("no JSON", "POST", COMPLETIONS, b"{"),
    Case("unknown model", "POST", COMPLETIONS, {"model": "nonsense", "prompt": "a"}, ["nonsense"]),
    Case("unsupported: embeddings", "POST", "/v1/embeddings", {"input": "a"}),
    Case("unsupported: scores", "POST", "/score", {"text_1": "a", "text_2": "b"}),
    Case("unsupported: ranking", "POST", "/rerank", {"query": "a", "documents": ["b"]}),
    Case("unsupported: pooling", "POST", "/pooling", {"input": "a"}),
    Case("unsupported: classification", "POST", "/classify", {"input": "a"}),
    Case("is_sleeping", "GET", "/is_sleeping"),
    Case("reset_prefix_cache", "POST", "/reset_prefix_cache"),
    Case("a request's id in the header", "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 2, **GREEDY}, headers={"x-request-id": "mine"}),
]  # fmt: skip


def pooling(name: str, path: str, offenders: Sequence[str] = (), **body: Any) -> Case:
    return Case(f"pooling: {name}", "POST", path, body, offenders, kind="pooling")


POOLING_CASES = [
    pooling("embedding", "/v1/embeddings", input="Hello"),
    pooling("embeddings", "/v1/embeddings", input=["Hello", "there"]),
    pooling("embedding of ids", "/v1/embeddings", input=[101, 7592, 102]),
    pooling("embedding as base64", "/v1/embeddings", input="Hello", encoding_format="base64"),
    pooling("embedding as bytes", "/v1/embeddings", input="Hello", encoding_format="bytes"),
    pooling("embedding of a chat", "/v1/embeddings", messages=HELLO),
    pooling("embedding, truncated", "/v1/embeddings", input="a b c d e", truncate_prompt_tokens=3),
    pooling("embedding without normalisation", "/v1/embeddings", input="a", use_activation=False),
    pooling("embedding, padded", "/v1/embeddings", input="a", padding=True),
    pooling("wrong: dimensions", "/v1/embeddings", ["dimensions", "7"], input="a", dimensions=7),
    pooling("wrong: format", "/v1/embeddings", ["encoding_format", "nonsense"], input="a", encoding_format="nonsense"),
    pooling("wrong: nothing", "/v1/embeddings", ["input"], input=[]),
    pooling("wrong: long", "/v1/embeddings", ["reduce the length of the input prompt"], input=LONG),
    pooling("pooling", "/pooling", input="Hello"),
    pooling("pooling of tokens", "/pooling", input="Hello", task="token_embed"),
    pooling("wrong: a task of another model", "/pooling", ["classify", "embed"], input="a", task="classify"),
    pooling("wrong: an unknown task", "/pooling", ["nonsense"], input="a", task="nonsense"),
    pooling("classification of a model that embeds", "/classify", ["classify"], input="a"),
    pooling("score", "/score", text_1="Hello", text_2=["Hello", "there"]),
    pooling("score by its other names", "/score", queries="Hello", documents=["Hello", "there"]),
    pooling("wrong: one side", "/score", ["text_2", "data_2"], text_1="a"),
    pooling("rerank", "/rerank", query="Hello", documents=["a", "b", "c"], top_n=2),
    pooling("rerank with a limit", "/rerank", query="Hello", documents=["a b c d e f"], max_tokens_per_doc=2),
    pooling("Cohere", "/v2/embed", texts=["Hello"], embedding_types=["float"], input_type="search_query"),
    pooling("Cohere: types", "/v2/embed", texts=["Hello"], embedding_types=["float", "base64", "int8", "binary", "uint8", "ubinary"], input_type="search_query"),
    pooling("Cohere: no type", "/v2/embed", texts=["Hello"]),
    pooling("wrong: unknown type of Cohere", "/v2/embed", ["embedding_types", "nonsense"], texts=["a"], embedding_types=["nonsense"]),
    pooling("wrong: unknown input type", "/v2/embed", ["input_type", "nonsense"], texts=["a"], input_type="nonsense"),
    pooling("unsupported: completion", COMPLETIONS, prompt="a"),
    pooling("unsupported: chat", CHAT, messages=HELLO),
    pooling("tokenize of a pooling model", "/tokenize", prompt="Hello", return_token_strs=True),
    pooling("wrong: normalize", "/v1/embeddings", ["normalize"], input="a", normalize=True),
]  # fmt: skip

CASES = [*COMPLETION_CASES, *CHAT_CASES, *OTHER_CASES, *POOLING_CASES]

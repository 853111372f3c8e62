"""litellm: completions, streams and embeddings, by its provider for vLLM."""

import sys

import httpx  # noqa: ASYNC127 - what litellm itself uses
import litellm

HI = [{"role": "user", "content": "Hello"}]


def name_of(url):
    return "hosted_vllm/" + httpx.get(f"{url}/v1/models").json()["data"][0]["id"]


def main(url, pooling_url):
    there = {"model": name_of(url), "api_base": f"{url}/v1", "api_key": "none"}
    reply = litellm.completion(messages=HI, max_tokens=8, **there)
    assert reply.usage.completion_tokens <= 8
    chunks = list(litellm.completion(messages=HI, max_tokens=8, stream=True, **there))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    there = {"model": name_of(pooling_url), "api_base": f"{pooling_url}/v1", "api_key": "none"}
    assert len(litellm.embedding(input=["one", "two"], **there).data) == 2


if __name__ == "__main__":
    main(*sys.argv[1:])

"""langchain-openai: `invoke`, `stream`, `bind_tools`, `with_structured_output`, embeddings."""

import sys
from typing import Literal

import httpx  # noqa: ASYNC127 - what langchain itself uses
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Reply(BaseModel):
    """A vote."""

    answer: Literal["yes", "no"]


def name_of(url):
    return httpx.get(f"{url}/v1/models").json()["data"][0]["id"]


def main(url, pooling_url):
    chat = ChatOpenAI(model=name_of(url), base_url=f"{url}/v1", api_key="none", max_tokens=64)
    assert chat.invoke("Hello").usage_metadata["output_tokens"] <= 64
    assert [chunk.content for chunk in chat.stream("Hello")]
    (call,) = chat.bind_tools([Reply], tool_choice="Reply").invoke("Hello").tool_calls
    assert call["args"]["answer"] in ("yes", "no")
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Reply, method=method).invoke("Hello")
        assert found.answer in ("yes", "no")
    # without `check_embedding_ctx_length=False` the client sends the ids of OpenAI's tokenizer
    embeddings = OpenAIEmbeddings(
        model=name_of(pooling_url), base_url=f"{pooling_url}/v1", api_key="none", check_embedding_ctx_length=False
    )  # fmt: skip
    assert len(embeddings.embed_documents(["one", "two"])) == 2


if __name__ == "__main__":
    main(*sys.argv[1:])

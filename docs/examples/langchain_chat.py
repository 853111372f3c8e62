"""LangChain at a trouper server: `pip install langchain-openai`, and `trouper serve Qwen/Qwen3-0.6B` beside it."""

from langchain_openai import ChatOpenAI, OpenAIEmbeddings

SERVER = "http://127.0.0.1:8000/v1"


def main() -> None:
    model = ChatOpenAI(base_url=SERVER, api_key="none", model="Qwen/Qwen3-0.6B", max_tokens=64)
    for chunk in model.stream("Name three uses of a paper clip."):
        print(chunk.content, end="", flush=True)
    print()


def embed(texts: list[str]) -> list[list[float]]:
    """Embed texts at a server of a pooling model: `trouper serve sentence-transformers/all-MiniLM-L6-v2`."""
    # Texts go as they are: by default LangChain would send token ids of OpenAI's own vocabulary.
    embeddings = OpenAIEmbeddings(
        base_url=SERVER,
        api_key="none",
        model="sentence-transformers/all-MiniLM-L6-v2",
        check_embedding_ctx_length=False,
    )
    return embeddings.embed_documents(texts)


if __name__ == "__main__":
    main()

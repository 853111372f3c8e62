"""The routes of pooling models: embeddings, classification, scores and reranking."""

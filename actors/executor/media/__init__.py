"""Compute the embeddings of images and recordings in a prompt, with vision and audio towers."""

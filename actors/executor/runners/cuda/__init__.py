"""The model runner of a GPU."""

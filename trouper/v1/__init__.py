"""Package of the engines' second names, under which newer programs of vLLM import them."""

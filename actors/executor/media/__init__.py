"""Vision towers: the rows of numbers used for images in a prompt."""

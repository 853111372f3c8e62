"""Vision towers: the rows of numbers that stand for images in a prompt."""

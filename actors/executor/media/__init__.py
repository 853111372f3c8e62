"""Vision and audio towers: the rows of numbers used for images and recordings in a prompt."""

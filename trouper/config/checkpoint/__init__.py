"""What the files of a model folder say, read from json files only."""

"""The page that shows a running server: its files, and the frames of its live state."""

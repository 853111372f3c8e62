"""Count, report and trace what an engine does."""

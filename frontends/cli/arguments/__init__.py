"""Options that several commands share, and what happens to options that trouper does not have."""

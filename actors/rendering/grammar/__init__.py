"""Grammars for structured output, tried on a budget before they are compiled."""

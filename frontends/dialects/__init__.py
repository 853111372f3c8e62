"""Parsers of what models write besides text: reasoning and tool calls, in the dialect each was trained on."""

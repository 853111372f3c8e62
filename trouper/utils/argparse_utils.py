"""Parser of command lines for programs that take an engine's options beside their own."""

import argparse
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that takes `--max_model_len` for `--max-model-len`, and dots for nested JSON.

    `--pooler-config.task embed` stands for `--pooler-config '{"task": "embed"}'`.
    """

    def parse_known_args(  # type: ignore[override]  # the overloads of argparse
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        import sys

        from trouper.config.dotted import join_dotted

        given = sys.argv[1:] if args is None else args
        return super().parse_known_args(join_dotted(map(_with_dashes, given)), namespace)


def _with_dashes(argument: str) -> str:
    """Spell an option with dashes; its value, and keys behind a dot, stay as they are."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    head, dot, keys = name.partition(".")
    return f"{head.replace('_', '-')}{dot}{keys}{equals}{value}"

"""The tokens that a piece of an answer came from."""

import pytest

from trouper.frontends.server.generation.logprobs import ChatToken, TokenSpans


@pytest.mark.parametrize(
    ("tokens", "pieces", "found"),
    [
        (["a", "b"], ["ab"], [[0, 1]]),
        (["<think>", "hm", "</think>", "\n\n", "yes"], ["hm", "yes"], [[1], [4]]),
        (["<think>", "yes", "</think>", "yes"], ["yes", "yes"], [[1], [3]]),
        (["ab"], ["a", "b"], [[0], []]),
        (["x>a", "b"], ["ab"], [[0, 1]]),
        (["", "", "\u00fc", "b"], ["\u00fc", "b"], [[0, 1, 2], [3]]),
        (["a", "b"], ["other", "b"], [[], [1]]),
        (["a"], ["", "a"], [[], [0]]),
        ([], ["a"], [[]]),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_each_piece_has_its_tokens(tokens, pieces, found, at_once):
    made = [ChatToken(text, -1.0, [], []) for text in tokens]
    spans = TokenSpans()
    for group in [made] if at_once else [[token] for token in made]:
        spans.add(group)
    taken = [spans.take(piece) for piece in pieces]
    assert [[made.index(token) for token in group] for group in taken] == [
        [next(i for i, token in enumerate(made) if token == made[j]) for j in group]
        for group in found
    ]

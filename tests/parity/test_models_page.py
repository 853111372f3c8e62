"""The page of models names what the code reads and what the tests have computed."""

from .models_page import PAGE, rendered


def test_lists_of_models_are_those_of_code():
    page = PAGE.read_text()
    assert rendered(page) == page, "python -m tests.parity.models_page writes them"

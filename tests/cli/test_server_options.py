"""Check that `trouper serve` offers each setting of the server once, with the default and range of its declaration."""

import math

import msgspec
import pytest
import typer

from trouper.errors import TrouperValidationError
from trouper.frontends.cli.main import app
from trouper.frontends.cli.server_options import (
    option_names,
    settings_from,
    variables_of,
)
from trouper.frontends.server.shared.settings import ServerSettings, ServeSettings

# Settings of an embedded application that have no option.
UNOFFERED = {"served_model_names", "max_step_age_s", "max_refusing_s", "max_path"}
# `--models` is declared by the command itself, because it is read before the other options.
DECLARED_BY_SERVE = {"models"}


def params():
    serve = typer.main.get_command(app).commands["serve"]
    return {param.name: param for param in serve.params}


def test_each_setting_has_one_option():
    offered = params()
    assert offered.keys() >= set(option_names())
    others = UNOFFERED | DECLARED_BY_SERVE
    assert len(option_names()) == len(ServeSettings.__struct_fields__) - len(others)
    assert set(ServerSettings.__struct_fields__) > UNOFFERED


def test_no_option_keeps_the_defaults():
    given = {name: params()[name].default for name in option_names()}
    assert settings_from(given) == settings_from({}) == ServeSettings()


def test_lists_become_tuples():
    settings = settings_from({"api_key": ["a", "b"], "allowed_origins": ["*"]})
    assert (settings.api_keys, settings.allowed_origins) == (("a", "b"), ("*",))


def test_adapters_are_read():
    (adapter,) = settings_from({"lora_modules": ["sql=/folder"]}).lora_modules
    assert (adapter.lora_name, adapter.lora_path) == ("sql", "/folder")


def test_ranges_are_those_of_the_declaration():
    port = params()["port"].type
    assert (port.min, port.max) == (0, 65535)


def test_variables_of_a_key():
    assert variables_of("api_key")[0] == "TROUPER_API_KEY"
    assert "VLLM_API_KEY" in variables_of("api_key")


@pytest.mark.parametrize("name", ["max_queue_delay_s", "request_timeout_s"])
def test_nan_is_refused(name):
    with pytest.raises(TrouperValidationError, match=name.removesuffix("_s")):
        msgspec.structs.replace(ServeSettings(), **{name: math.nan})

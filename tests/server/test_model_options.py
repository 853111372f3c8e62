"""Which models a server has: names on the command line, tables of a file, and a folder."""

import math

import pytest

from trouper.config.args import EngineArgs
from trouper.errors import TrouperValidationError
from trouper.frontends.server.models.options import (
    bytes_of,
    check_one,
    has_several,
    read_models,
    seconds_of,
    split_name,
)
from trouper.frontends.server.models.sizes import plan_models
from trouper.frontends.server.shared.settings import ServeSettings

DEMO = "trouper/demo"


def read(named=(), tables=None, base=None, given=(), **settings):
    args = EngineArgs(**(base or {}))
    return read_models(named, tables or {}, ServeSettings(**settings), args, given)


def test_name_ends_at_first_equals_sign():
    assert split_name("chat=a/b=c") == ("chat", "a/b=c")
    assert split_name("a/b=c") == (None, "a/b=c")
    assert not has_several(["a/b"], ServeSettings())
    assert has_several(["chat=a"], ServeSettings())


def test_tables_override_defaults_and_line_overrides_tables():
    tables = {
        "defaults": {"max-model-len": 64, "max-num-seqs": 4, "keep-alive": "1m"},
        "a": {"model": "x", "alias": ["b"], "max-num-seqs": 2, "pin": True, "lora": {"l": "/l"}},
    }
    (model,) = read(tables=tables, base={"max_model_len": 32}, given={"max_model_len"})
    args = model.args
    assert (args.max_model_len, args.max_num_seqs, args.model) == (32, 2, "x")
    assert (args.served_model_name, args.enable_lora) == (["a", "b"], True)
    assert (model.keep_alive_s, model.is_pinned, model.is_preloaded) == (60.0, True, True)
    assert [(each.lora_name, each.lora_path) for each in model.adapters] == [("l", "/l")]


@pytest.mark.parametrize(
    ("named", "tables", "settings", "text"),
    [
        (["a=x", "a=y"], {}, {}, "two models, x and y"),
        (["x", "a=y"], {}, {}, "needs a name"),
        (["=x"], {}, {}, "non-empty name"),
        (["a=x"], {"b": {"model": "y", "alias": "a"}}, {}, "two models"),
        ([], {"a": {"modle": "x"}}, {}, "did you mean model"),
        ([], {"a": {"pin": True}}, {}, "missing in the table of a"),
        ([], {"a": {"model": "x", "device_worker": "inline"}}, {}, "must be process"),
        ([], {"a": {"model": "x", "lora": "/l"}}, {}, "table of names"),
        ([], {"a": {"model": "x", "keep_alive": "soon"}}, {}, "duration"),
        (["a=x"], {}, {"pin": ("b",)}, "must be one of the server's models, a"),
        (["a=x"], {}, {"default_model": "b"}, "must be one of"),
        ([], {}, {"models_dir": "/no/such"}, "not a folder"),
        ([], {"defaults": {}}, {"models": "f"}, "contains no model"),
    ],
)
def test_mistake_is_named(named, tables, settings, text):
    with pytest.raises(TrouperValidationError, match=text):
        read(named, tables, **settings)


def test_options_of_one_model_are_refused():
    with pytest.raises(TrouperValidationError, match="describes a single model"):
        read(["a=x"], given={"served_model_name"})
    with pytest.raises(TrouperValidationError, match=r"keep_alive.*requires named models"):
        check_one(ServeSettings(keep_alive="5m"))
    with pytest.raises(TrouperValidationError, match="no_autoload"):
        check_one(ServeSettings(autoload=False))
    check_one(ServeSettings())


def test_folder_lists_each_model_once(tmp_path):
    for name in ("org/chat", "org/chat/1_Pooling", ".cache/old"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    for name in ("one.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "org" / "loop").symlink_to(tmp_path)
    found = read(models_dir=str(tmp_path))
    assert [model.name for model in found] == ["big", "one", "org/chat"]
    assert all(model.is_found for model in found)


def test_broken_model_of_folder_harms_no_other(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("not json")
    (tmp_path / "good").symlink_to(f"{__file__.rsplit('/tests/')[0]}/{DEMO}")
    plans = plan_models(read(models_dir=str(tmp_path), base={"max_model_len": 64}), 2**30)
    broken, good = plans
    assert broken.config is None
    assert broken.error
    assert good.config is not None
    assert 0 < good.memory.kv < 2**30


def test_model_above_budget_is_named_with_numbers():
    with pytest.raises(
        TrouperValidationError, match=r"a needs \d+ MiB in addition to \d+ MiB.*budget is 64"
    ):
        plan_models(read(["a=" + DEMO, "b=" + DEMO]), bytes_of("64MiB", "memory_budget"))
    with pytest.raises(TrouperValidationError, match="a: "):
        plan_models(read(["a=/no/such/model"]), 2**30)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("12GiB", 12 * 2**30), ("1.5g", 3 * 2**29), ("7", 7), ("64 MB", 64 * 2**20), ("2k", 2048)],
)
def test_sizes_have_units(text, wanted):
    assert bytes_of(text, "memory_budget") == wanted


def test_wrong_size_is_refused():
    for text in ("", "much", "-1", "1x", "1e9"):
        with pytest.raises(TrouperValidationError, match="memory_budget"):
            bytes_of(text, "memory_budget")


def test_durations_have_units():
    wanted = {"5m": 300, "1h30m": 5400, "0": 0, 7: 7, "1.5s": 1.5, "-1": math.inf, "-5m": math.inf}
    assert {text: seconds_of(text, "turn") for text in wanted} == wanted
    assert seconds_of("0s", "turn") == 0
    for text in ("soon", "nan", "", "5 parsecs"):
        with pytest.raises(TrouperValidationError, match="turn"):
            seconds_of(text, "turn")

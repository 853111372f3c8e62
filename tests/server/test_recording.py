"""Records of requests: what they contain, who may read them, and a replay that finds a changed token."""

import json
import re
import stat
import subprocess
import sys

import msgspec
import pytest
import trio

from tests.support.adapters import write_adapter
from trouper.actors.messages.requests import RequestOptions
from trouper.frontends.server.durable.recording import (
    RecordedAdapter,
    RecordHead,
    RequestRecorder,
    digest,
)
from trouper.lora import LoRARequest
from trouper.outputs import CompletionOutput, RequestOutput
from trouper.params import SamplingParams

from .process import started, stop

HEAD = RecordHead(0.0, "1", "m", "00", "float32", {}, {}, has_content=False)
JSON = [("content-type", "application/json")]


class Numbered:
    engine_id = 7


def output(ids, finish_reason=None, prompt=(1, 2, 3)):
    completion = CompletionOutput(0, "secret", list(ids), None, None, finish_reason)
    return RequestOutput(
        "r-0", "secret", list(prompt), None, [completion], finish_reason is not None
    )


async def recorded(folder, head, params, prompt="secret"):
    """Record one answer in two parts.  Returns the lines of the file."""
    recorder = RequestRecorder(folder, head, 0)
    async with trio.open_nursery() as nursery:
        await nursery.start(recorder.run_writer)
        recording = recorder.begin([prompt], params, RequestOptions())
        list(recording.listed([Numbered()]))
        recording.note(0, output([4, 5]))
        recording.note(0, output([6], "stop"))
        recording.end()
        recording.end()
        nursery.cancel_scope.cancel()
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    return file.read_text().splitlines()


@pytest.mark.trio
async def test_record_without_content_has_only_digests(tmp_path):
    params = SamplingParams(temperature=0.5, bad_words=["secret"], stop=["secret"])
    _, line = await recorded(tmp_path, HEAD, params)
    record = json.loads(line)
    assert "secret" not in line
    assert record["prompt"] == {"num": 3, "sha256": digest([1, 2, 3])}
    assert record["outputs"][0]["tokens"] == {"num": 3, "sha256": digest([4, 5, 6])}
    assert record["withheld"] == ["bad_words"]
    assert record["params"] == {"temperature": 0.5}


@pytest.mark.trio
async def test_record_with_content_has_token_ids(tmp_path):
    head = RecordHead(0.0, "1", "m", "00", "float32", {}, {}, has_content=True)
    _, line = await recorded(tmp_path, head, SamplingParams(seed=5, bad_words=["x"]))
    record = json.loads(line)
    assert (record["prompt"]["ids"], record["outputs"][0]["tokens"]["ids"]) == (
        [1, 2, 3],
        [4, 5, 6],
    )
    assert record["seed"] == 5
    assert record["params"]["bad_words"] == ["x"]
    assert "withheld" not in record


@pytest.mark.trio
async def test_record_names_parts_that_are_no_tokens(tmp_path):
    _, line = await recorded(tmp_path, HEAD, SamplingParams(), {"multi_modal_data": {"image": 1}})
    assert json.loads(line)["withheld"] == ["multi_modal_data"]


@pytest.mark.trio
async def test_record_names_an_adapter_loaded_later(tmp_path):
    head = msgspec.structs.replace(HEAD, adapters={"poet": RecordedAdapter("/poet", "00")})
    recorder = RequestRecorder(tmp_path, head, 0)
    assert recorder.changes_of(LoRARequest("poet", 1, "/poet")) == []
    for later in (LoRARequest("poet", 2, "/other"), LoRARequest("bard", 1, "/poet")):
        assert recorder.changes_of(later) == [
            f"the adapter {later.lora_name}, loaded after the start"
        ]


@pytest.mark.trio
async def test_slow_disk_drops_records_and_counts_them(tmp_path, monkeypatch):
    monkeypatch.setattr("trouper.frontends.server.durable.recording.MAX_PENDING_BYTES", 500)
    recorder = RequestRecorder(tmp_path, HEAD, 0)
    for _ in range(5):
        recording = recorder.begin(["x"], SamplingParams(), RequestOptions())
        list(recording.listed([Numbered()]))
        recording.note(0, output([4], "length"))
        recording.end()
    assert recorder.num_dropped >= 3


def replay(*arguments):
    command = [sys.executable, "-m", "trouper", "replay", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_replay_is_equal_and_finds_a_changed_token(tmp_path):
    folder = tmp_path / "records"
    adapter = write_adapter(tmp_path / "poet")
    options = ("--dtype", "float32", "--record", str(folder), "--record-content")
    options += ("--enable-lora", "--lora-modules", f"poet={adapter}")
    with started(*options) as server:
        for i in range(12):
            body = {"prompt": "def f(" * (1 + i % 3), "max_tokens": 8 + i, "stream": i % 2 == 0}
            body["model"] = "poet" if i % 4 == 0 else None
            body |= {"temperature": 0} if i % 3 == 0 else {"n": 2, "stop": ["return"]}
            status, _, answer = server.request(
                "POST", "/v1/completions", json.dumps(body).encode(), JSON
            )
            assert status == 200, answer
        assert stop(server) == 0
    code, text = replay(folder)
    assert (code, text.splitlines()[-1]) == (0, "12 requests replayed, 0 differences")
    (file,) = folder.iterdir()
    lines = file.read_text().splitlines()
    record = json.loads(lines[1])
    tokens = record["outputs"][0]["tokens"]
    tokens["ids"][3] = (tokens["ids"][3] + 1) % 100
    tokens["sha256"] = digest(tokens["ids"])
    file.write_text("\n".join([lines[0], json.dumps(record), "{damaged", *lines[2:4]]) + "\n")
    code, text = replay(file)
    assert code == 1
    assert re.search(r":2 .* token 3 is \d+ instead of \d+; ", text)
    assert "skipped 1: the line is damaged" in text
    code, text = replay(file, "--dtype", "bfloat16")
    assert code == 2
    assert "--dtype float32" in text
    (tmp_path / "poet" / "adapter_config.json").write_text("{}")
    code, text = replay(file)
    assert code == 2
    assert "the files of the adapter poet have changed since" in text

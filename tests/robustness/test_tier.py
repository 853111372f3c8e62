"""The tier on disk of real engines: restarts, damaged files, slow and hanging disks, kills, and the options."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import asynccontextmanager, suppress

import anyio
import pytest

from tests.support.adapters import random_tensors, write_adapter
from tests.support.vision import VisionModel, image, text
from trouper import LLM, LoRARequest, SamplingParams
from trouper.actors.engine.wiring import open_engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.steps import tier_thread
from trouper.actors.executor.steps.tier_files import HEAD, PACKED, TierDisk
from trouper.actors.executor.workers.launching import MODULE, launch
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.config.tier import tier_config
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

OPTIONS = {
    "load_format": "dummy",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 16,
    "max_num_seqs": 4,
}
PROMPTS = [[(i * i + 7 * n) % 90 + 5 for i in range(150)] for n in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


def an_llm(folder, **options):
    return LLM(
        "tiny", kv_tier_dir=None if folder is None else str(folder), **{**OPTIONS, **options}
    )


def answers(llm, prompts=PROMPTS):
    """Return the tokens and logprobs of each answer, and how many prompt tokens came from a cache."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = llm.generate(given, GREEDY, use_tqdm=False)
    found = [
        [
            (token, round(of[token].logprob, 4))
            for token, of in zip(each.token_ids, each.logprobs, strict=True)
        ]
        for each in (result.outputs[0] for result in results)
    ]
    return found, sum(r.num_cached_tokens for r in results)


def files_of(folder):
    return sorted(f for f in folder.rglob("*.*") if len(f.name) == 81)


def wait_for(is_done):
    """Wait until the thread of the tier has done something."""
    for _ in range(2000):
        if is_done():
            return
        threading.Event().wait(0.005)
    raise AssertionError("the thread has not done it")


def wait_for_files(folder, count):
    """Wait until the thread has written this many files."""
    wait_for(lambda: len(files_of(folder)) >= count)


def num_bytes(folder):
    """Add up the sizes of all files, which may vanish meanwhile."""
    total = 0
    for file in files_of(folder):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


@pytest.fixture(scope="module")
def expected():
    with an_llm(None) as llm:
        return answers(llm)[0]


@pytest.fixture(scope="module")
def stored(tmp_path_factory, expected):
    """A folder with the blocks of all prompts and their answers."""
    folder = tmp_path_factory.mktemp("tier")
    folder.chmod(0o700)
    with an_llm(folder) as llm:
        assert answers(llm) == (expected, 0)
        # Nine full blocks of each sequence of 157 computed tokens.
        wait_for_files(folder, 27)
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder with blocks in bfloat16, and the tokens of the answers."""
    folder = tmp_path_factory.mktemp("packed")
    folder.chmod(0o700)
    with an_llm(folder, dtype="bfloat16") as llm:
        found = tokens(answers(llm)[0])
        wait_for_files(folder, 27)
    return folder, found


# The models with recurrent states, with random weights: convolutions, a delta rule, and Mamba with mixtures of experts.
SHAPE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
HYBRIDS = {
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", DELTA),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {**DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
         "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": []},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 16,
         "mamba_d_conv": 4, "mamba_n_groups": 1, "shared_intermediate_size": 64, "num_local_experts": 0, "num_experts_per_tok": 0},
    ),
}  # fmt: skip


class Hybrid:
    """A model with recurrent states, and a folder in which an engine has left prefixes."""

    def __init__(self, kind, root):
        architecture, fields = HYBRIDS[kind]
        config = {"architectures": [architecture], "model_type": kind, **SHAPE, **fields}
        self.model, self.folder = root / "model", root / "tier"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(config))
        with self.llm(None) as llm:
            self.expected = answers(llm)[0]
        with self.llm(self.folder) as llm:
            assert answers(llm) == (self.expected, 0)
            wait_for_files(self.folder, 27)
            # One behind the last boundary of each prompt.
            wait_for(lambda: len(self.states()) >= 3)

    def llm(self, folder, **options):
        folder = None if folder is None else str(folder)
        return LLM(
            str(self.model), kv_tier_dir=folder, **{**OPTIONS, "max_model_len": 256, **options}
        )

    def states(self):
        return sorted(f for f in self.folder.rglob("*.*") if len(f.name) == 83)

    def all_files(self):
        return files_of(self.folder) + self.states()


@pytest.mark.parametrize(
    "kind", ["lfm2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in HYBRIDS if kind != "lfm2")]
)  # fmt: skip
def test_states_survive_the_engine(kind, tmp_path):
    hybrid = Hybrid(kind, tmp_path)
    with hybrid.llm(hybrid.folder) as llm:
        assert answers(llm) == (hybrid.expected, 3 * 144)
    # Without its state, a prefix is not found, and without its blocks neither.
    state, block = hybrid.states()[0], files_of(hybrid.folder)[0]
    state.unlink()
    with hybrid.llm(hybrid.folder) as llm:
        assert answers(llm) == (hybrid.expected, 2 * 144)
        wait_for(lambda: len(hybrid.states()) == 3)
    block.unlink()
    with hybrid.llm(hybrid.folder) as llm:
        assert answers(llm) == (hybrid.expected, 2 * 144)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return Hybrid("qwen3_5_text", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture
def copied_hybrid(hybrid, tmp_path):
    """The folder of a tier with states, which a test may damage."""
    copy = object.__new__(Hybrid)
    copy.model, copy.expected, copy.folder = hybrid.model, hybrid.expected, tmp_path / "tier"
    subprocess.run(["cp", "-a", hybrid.folder, copy.folder], check=True)
    return copy


def damage_states(hybrid, number):
    states = hybrid.states()
    for place, path in enumerate(states):
        # The thread may remove a file at the same time, and a round before may have taken the right to read it.
        with suppress(FileNotFoundError, PermissionError):
            damage(path, number, states[place - 1])


@pytest.mark.slow
def test_damaged_states_cost_only_time(copied_hybrid):
    hybrid = copied_hybrid
    for number in range(9):
        damage_states(hybrid, number)
        with hybrid.llm(hybrid.folder) as llm:
            found, num_cached = answers(llm)
            assert found == hybrid.expected
            # The last exchanged file is whole again, and a superuser may read files without a mode.
            assert num_cached <= 144 or number == 8
            # Computed states are written again.
            wait_for(lambda: len(hybrid.states()) == 3)


@pytest.mark.slow
def test_states_may_change_while_in_use(copied_hybrid):
    hybrid = copied_hybrid
    with hybrid.llm(hybrid.folder) as llm:
        for number in range(18):
            damage_states(hybrid, number)
            assert llm.reset_prefix_cache()
            assert answers(llm)[0] == hybrid.expected


@pytest.mark.slow
def test_links_and_states_of_other_models_are_removed(copied_hybrid):
    hybrid, states = copied_hybrid, copied_hybrid.states()
    outside = hybrid.folder.parent / "outside"
    outside.write_bytes(states[0].read_bytes())
    states[0].unlink()
    states[0].symlink_to(outside)
    blocks = files_of(hybrid.folder)
    states[1].write_bytes(blocks[0].read_bytes())
    blocks[0].write_bytes(states[2].read_bytes())
    with hybrid.llm(hybrid.folder) as llm:
        found, num_cached = answers(llm)
        assert found == hybrid.expected
        assert num_cached <= 144
    with hybrid.llm(hybrid.folder, dtype="bfloat16") as llm:
        assert answers(llm)[1] == 0


@pytest.mark.slow
def test_hanging_disk_stops_no_model_with_states(copied_hybrid, monkeypatch):
    hybrid, disk = copied_hybrid, Slow()
    monkeypatch.setattr(tier_thread, "TierDisk", lambda: disk)
    monkeypatch.setattr(tier_thread, "CLOSE_S", 0.01)
    monkeypatch.setattr("trouper.actors.scheduling.state.tier.FIRST_DEADLINE_S", 0.05)
    with hybrid.llm(hybrid.folder) as llm:
        assert answers(llm) == (hybrid.expected, 0)
        assert llm.reset_prefix_cache()
        assert answers(llm)[0] == hybrid.expected
        llm.sleep(level=1)
        llm.wake_up()
        assert answers(llm)[0] == hybrid.expected
    disk.goes_on.set()


@pytest.mark.slow
def test_states_stay_within_the_bound_and_are_removed(copied_hybrid):
    hybrid = copied_hybrid
    size, of_state = 60_000, hybrid.states()[0].stat().st_size
    with hybrid.llm(hybrid.folder, kv_tier_size=size, kv_tier_min_free=0.0) as llm:
        for _ in range(3):
            assert answers(llm)[0] == hybrid.expected
            assert llm.reset_prefix_cache()
        wait_for(lambda: sum(f.stat().st_size for f in hybrid.all_files()) <= size)
        assert llm.reset_prefix_cache(reset_connector=True)
        wait_for(lambda: not hybrid.all_files())
        assert answers(llm) == (hybrid.expected, 0)
    with pytest.raises(TrouperValidationError, match="too small for one state"):
        hybrid.llm(hybrid.folder, kv_tier_size=of_state - 1)


def tokens(found):
    return [[token for token, _ in answer] for answer in found]


@pytest.fixture
def copied(stored, tmp_path):
    """A copy of the folder, which a test may damage."""
    folder = tmp_path / "tier"
    subprocess.run(["cp", "-a", stored, folder], check=True)
    return folder


def test_prefixes_survive_the_engine(copied, expected):
    with an_llm(copied) as llm:
        assert answers(llm) == (expected, 3 * 144)


def damage(path, number, other):
    """Damage a file, in another way for each number."""
    # A file that was emptied before has one byte that these ways can change.
    data = bytearray(path.read_bytes() or b"T")
    match number % 9:
        case 0:
            data[number * 7919 % len(data)] ^= 1 << number % 8
        case 1:
            del data[number * 7919 % len(data) :]
        case 2:
            data[500:900] = bytes(400)
        case 3:
            data = other.read_bytes()
        case 4:
            data = b""
        case 5:
            return path.unlink()
        case 6:
            data[number % min(70, len(data))] ^= 255
        case 7:
            data += bytes(10)
        case 8:
            return path.chmod(0)
    return path.write_bytes(data)


@pytest.mark.parametrize("first", range(3))
def test_damaged_files_cost_only_time(copied, expected, first):
    files = files_of(copied)
    for number, path in enumerate(files):
        damage(path, first + 3 * number, files[number - 1])
    for _ in range(2):
        with an_llm(copied) as llm:
            assert answers(llm)[0] == expected


def test_packed_files_are_smaller_and_may_be_damaged(packed, tmp_path):
    folder, expected = tmp_path / "tier", packed[1]
    subprocess.run(["cp", "-a", packed[0], folder], check=True)
    files = files_of(folder)
    heads = [HEAD.unpack_from(path.read_bytes()) for path in files]
    assert {head[2] for head in heads} == {PACKED}
    assert all(
        path.stat().st_size < 0.95 * head[4] for path, head in zip(files, heads, strict=True)
    )
    with an_llm(folder, dtype="bfloat16") as llm:
        found, num_cached = answers(llm)
        assert (tokens(found), num_cached) == (expected, 3 * 144)
        for number in range(3):
            files = files_of(folder)
            for place, path in enumerate(files[number::3]):
                with suppress(FileNotFoundError, PermissionError):
                    damage(path, place + number, files[place - 1])
            assert llm.reset_prefix_cache()
            assert tokens(answers(llm)[0]) == expected


def test_files_may_vanish_and_change_while_in_use(copied, expected):
    with an_llm(copied) as llm:
        for number in range(6):
            files = files_of(copied)
            for place, path in enumerate(files):
                # The thread may remove a file at the same time, and a round
                # before may have taken the right to read it.
                with suppress(FileNotFoundError, PermissionError):
                    if (place + number) % 3:
                        damage(path, place + number, files[place - 1])
            assert llm.reset_prefix_cache()
            assert answers(llm)[0] == expected


class Slow(TierDisk):
    """A disk that waits for an event before each call, or for ever."""

    def __init__(self):
        self.goes_on = threading.Event()

    def read(self, path, most):
        self.goes_on.wait()
        return super().read(path, most)

    def write(self, path, parts):
        self.goes_on.wait()
        super().write(path, parts)


def test_hanging_disk_stops_nothing(copied, expected, monkeypatch):
    disk = Slow()
    monkeypatch.setattr(tier_thread, "TierDisk", lambda: disk)
    monkeypatch.setattr(tier_thread, "CLOSE_S", 0.01)
    monkeypatch.setattr("trouper.actors.scheduling.state.tier.FIRST_DEADLINE_S", 0.05)
    with an_llm(copied) as llm:
        assert answers(llm) == (expected, 0)
        assert answers(llm)[0] == expected
        assert llm.reset_prefix_cache()
        assert answers(llm)[0] == expected
        llm.sleep(level=1)
        llm.wake_up()
        assert answers(llm)[0] == expected
    disk.goes_on.set()


def test_sleep_keeps_the_files(copied, expected):
    with an_llm(copied) as llm:
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert answers(llm)[0] == expected
        assert len(files_of(copied)) == 27


def test_reset_of_the_connector_removes_the_files(copied):
    with an_llm(copied) as llm:
        answers(llm, PROMPTS[:1])
        assert llm.reset_prefix_cache(reset_connector=True)
        wait_for(lambda: not files_of(copied))
        assert answers(llm)[1] == 0


def test_another_model_does_not_find_the_files(copied, expected):
    for options in ({"seed": 1}, {"dtype": "bfloat16"}, {"quantization": "int8"}):
        with an_llm(copied, **options) as llm:
            assert answers(llm)[1] == 0
    with an_llm(copied) as llm:
        assert answers(llm) == (expected, 3 * 144)


def test_folder_stays_within_its_bound(tmp_path, expected):
    folder = tmp_path / "new"
    size = 60_000
    with an_llm(folder, kv_tier_size=size, kv_tier_min_free=0.0) as llm:
        for _ in range(3):
            assert answers(llm)[0] == expected
            assert llm.reset_prefix_cache()
            assert num_bytes(folder) <= size
    assert os.stat(folder).st_mode & 0o777 == 0o700


def test_drafts_behind_a_fetched_prefix_are_right(tmp_path):
    """The draft model is the model itself, so each draft is right as long as it reads the same keys."""
    speculation = {"model": "tiny", "num_speculative_tokens": 3}
    sampling = SamplingParams(temperature=1, seed=5, max_tokens=64, ignore_eos=True)
    for num_cached in (0, 3 * 144):
        with an_llm(tmp_path / "t", speculative_config=speculation, disable_log_stats=False) as llm:
            given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            results = llm.generate(given, sampling, use_tqdm=False)
            assert sum(result.num_cached_tokens for result in results) == num_cached
            counts = {each.name.split(":")[-1]: each for each in llm.get_metrics()}
            drafted, accepted = (
                counts[f"spec_decode_num_{kind}_tokens"].value for kind in ("draft", "accepted")
            )
            assert drafted == accepted > 0
            wait_for_files(tmp_path / "t", 27)


def test_salts_and_scopes_keep_files_apart(copied):
    with an_llm(copied) as llm:
        salted = [{"prompt_token_ids": PROMPTS[0], "cache_salt": "mine"}]
        (result,) = llm.generate(salted, GREEDY, use_tqdm=False)
        assert result.num_cached_tokens == 0
        wait_for_files(copied, 36)
    with an_llm(copied) as llm:
        (result,) = llm.generate(salted, GREEDY, use_tqdm=False)
        assert result.num_cached_tokens == 144


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llava", "gemma3"])
def test_prompts_with_images_survive_the_engine(tmp_path, kind):
    """Another image of the same size finds only what is before it; an image that a client has named is not written."""
    model = VisionModel(kind, tmp_path / "model").folder
    options = {
        "dtype": "float32",
        "max_model_len": 512,
        "block_size": 16,
        "media_processor": "thread",
    }
    chats = [
        [{"role": "user", "content": [text("Look: " * 8), image(number), text(" What? " * 9)]}]
        for number in (1, 2)
    ]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def life(tier, number):
        with LLM(str(model), kv_tier_dir=tier, **options) as llm:
            (result,) = llm.chat(chats[number], params, use_tqdm=False)
            count = (len(result.prompt_token_ids) + 5) // 16
            if tier is not None and number == 0:
                wait_for_files(tmp_path / "tier", count)
            return list(result.outputs[0].token_ids), result.num_cached_tokens

    tier = str(tmp_path / "tier")
    expected = [life(None, number)[0] for number in (0, 1)]
    assert life(tier, 0) == (expected[0], 0)
    found, num_cached = life(tier, 0)
    assert found == expected[0]
    assert num_cached > 64
    other, num_cached_of_other = life(tier, 1)
    assert other == expected[1]
    assert num_cached_of_other < num_cached
    before = len(files_of(tmp_path / "tier"))
    for part in chats[0][0]["content"]:
        if part["type"] != "text":
            part["uuid"] = "mine"
    chats[0][0]["content"][0]["text"] = "See: " * 8
    with LLM(str(model), kv_tier_dir=tier, **options) as llm:
        llm.chat(chats[0], params, use_tqdm=False)
        # Blocks are written in order, so these come last.
        answers(llm, PROMPTS[:1])
        wait_for_files(tmp_path / "tier", before + 9)
    assert len(files_of(tmp_path / "tier")) == before + 9


@pytest.mark.slow
def test_adapter_of_the_same_name_finds_no_foreign_block(tmp_path):
    """Two adapters take turns under one name and number; the third life has the first one again."""
    options = {"dtype": "float32", "enable_lora": True, "max_lora_rank": 4, "block_size": 16}
    folders = [
        write_adapter(tmp_path / str(seed), random_tensors(seed=seed, scale=3.0)) for seed in (1, 2)
    ]
    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]

    def life(adapter, tier):
        with LLM(kv_tier_dir=tier, **options) as llm:
            request = LoRARequest("mine", 1, adapter)
            results = llm.generate(given, GREEDY, lora_request=request, use_tqdm=False)
            if tier is not None:
                wait_for_files(tmp_path / "tier", 9 * len(PROMPTS))
            found = [list(result.outputs[0].token_ids) for result in results]
            return found, sum(result.num_cached_tokens for result in results)

    tier = str(tmp_path / "tier")
    expected = [life(adapter, None)[0] for adapter in folders]
    assert expected[0] != expected[1]
    assert life(folders[0], tier) == (expected[0], 0)
    assert life(folders[1], tier) == (expected[1], 0)
    assert life(folders[0], tier) == (expected[0], 3 * 144)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"kv_tier_size": "20GiB"}, "kv_tier_size"),
        ({"kv_tier_dir": ""}, "kv_tier_dir"),
        ({"kv_tier_dir": "{}", "kv_tier_size": 0}, "kv_tier_size"),
        ({"kv_tier_dir": "{}", "kv_tier_size": "many"}, "kv_tier_size"),
        ({"kv_tier_dir": "{}", "kv_tier_write_rate": -1}, "kv_tier_write_rate"),
        ({"kv_tier_dir": "{}", "kv_tier_min_free": 1.0}, "kv_tier_min_free"),
        ({"kv_tier_dir": "{}", "enable_prefix_caching": False}, "kv_tier_dir"),
        ({"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}, "kv_transfer_config"),
        ({"kv_tier_dir": "/dev/null/x"}, "kv_tier_dir"),
    ],
)
def test_bad_options_are_refused_by_name(tmp_path, options, parameter):
    options = {k: str(tmp_path / "t") if v == "{}" else v for k, v in options.items()}
    with pytest.raises((TrouperValidationError, UnsupportedFeatureError)) as caught:
        resolve(EngineArgs("tiny", **{**OPTIONS, **options}))
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("options", [{"nnodes": 2}, {"distributed_executor_backend": "ray"}])
def test_several_machines_are_refused_by_name(tmp_path, options):
    args = EngineArgs("tiny", kv_tier_dir=str(tmp_path / "t"), **options)
    with pytest.raises(UnsupportedFeatureError, match="machine") as caught:
        tier_config(args, "cpu", generates=True)
    assert caught.value.parameter == "kv_tier_dir"
    assert not (tmp_path / "t").exists()


def test_open_folder_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(TrouperValidationError, match="chmod 700"):
        resolve(EngineArgs("tiny", kv_tier_dir=str(tmp_path), **OPTIONS))


def test_connector_of_vllm_names_the_folder(tmp_path):
    extra = {"spec_name": "TieringOffloadingSpec"}
    extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(tmp_path / "t")}]
    config = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    found = resolve(EngineArgs("tiny", kv_transfer_config=config, **OPTIONS)).tier
    assert found is not None
    assert found.folder == str(tmp_path / "t")


def test_tier_without_room_for_one_block_is_refused(tmp_path):
    with pytest.raises(TrouperValidationError, match="one block"):
        an_llm(tmp_path / "t", kv_tier_size=1000)


def a_server(folder, port):
    command = [
        sys.executable, "-m", "trouper", "serve", "-m", "tiny", "--load-format", "dummy", "--skip-tokenizer-init",
        "--block-size", "16", "--dtype", "float32", "--port", str(port), "--kv-tier-dir", str(folder),
    ]  # fmt: skip
    server = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=1):
                return server
        except OSError:
            threading.Event().wait(0.05)
    raise AssertionError("the server did not start")


def complete(port, prompt):
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    body |= {"return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode()
    )
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["choices"][0]["token_ids"]


def hit_tokens(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if "kv_tier_hit_tokens_total{" in line)


@asynccontextmanager
async def workers_of(folder, module=MODULE, model="tiny", **sizes):
    """Open an engine of worker processes with one folder.  Yields it and a function that kills one of them."""
    options = {**OPTIONS, **sizes, "kv_tier_dir": str(folder), "max_worker_restarts": 1000}
    config = resolve(EngineArgs(str(model), **options))
    peers = {}

    def start(worker, *, files=()):
        peers[worker] = launch(worker, module, files=files)
        return peers[worker]

    devices = [ProcessDevice(config, start, replica=r) for r in range(config.data_parallel_size)]
    async with open_engine(config, devices) as engine:
        yield engine, lambda worker, number: os.kill(peers[worker].pid, number)


async def stream_all(engine, label, tell):
    """Return the tokens of each prompt.  `tell` is called with the number of outputs so far."""
    found = {}

    async def read(number):
        prompt = {"prompt_token_ids": PROMPTS[number % len(PROMPTS)]}
        async for output in engine.generate(prompt, GREEDY, f"{label}-{number}"):
            found[number] = list(output.outputs[0].token_ids)
            tell(sum(map(len, found.values())))

    tell(0)
    async with anyio.create_task_group() as readers:
        for number in range(2 * len(PROMPTS)):
            readers.start_soon(read, number)
    return [found[number] for number in sorted(found)]


async def kill_again_and_again(folder, expected, num_kills, **sizes):
    """Kill workers that store and fetch, before and after first tokens.  Returns how many tokens came from the disk."""
    async with workers_of(folder, **sizes) as (engine, kill):
        for number in range(num_kills):
            when, how = number % 7, signal.SIGSEGV if number % 3 == 2 else signal.SIGKILL

            def tell(count, when=when, how=how, victim=number % 2, killed=[]):  # noqa: B006
                if count >= when and not killed:
                    killed.append(when)
                    kill(victim, how)

            await engine.controls.reset_prefix_cache()
            assert await stream_all(engine, number, tell) == 2 * expected
            with anyio.fail_after(60):
                while any(r.is_device_lost for r in engine.statistics().replicas):  # noqa: ASYNC110
                    await anyio.sleep(0.02)
        return sum(r.tier_hit_tokens for r in engine.statistics().replicas)


@pytest.mark.slow
@pytest.mark.trio
@pytest.mark.parametrize(
    "sizes",
    [{"data_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}],
    ids=["replicas", "stages", "ranks"],
)
async def test_killed_workers_with_one_folder_change_no_token(copied, expected, sizes):
    assert await kill_again_and_again(copied, tokens(expected), 3, **sizes) > 0


@pytest.mark.slow
@pytest.mark.trio
async def test_killed_stages_with_states_change_no_token(copied_hybrid):
    hybrid, wanted = copied_hybrid, tokens(copied_hybrid.expected)
    options = {"model": hybrid.model, "max_model_len": 256, "pipeline_parallel_size": 2}
    assert await kill_again_and_again(hybrid.folder, wanted, 3, **options) > 0


@pytest.mark.slow
def test_prefixes_survive_a_killed_server(tmp_path, expected):
    folder, found = tmp_path / "tier", []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for life in range(2):
        server = a_server(folder, port)
        try:
            found.append([list(complete(port, prompt)) for prompt in PROMPTS])
            assert hit_tokens(port) == life * 3 * 144
            wait_for_files(folder, 27)
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    assert found == 2 * [[[token for token, _ in answer] for answer in expected]]

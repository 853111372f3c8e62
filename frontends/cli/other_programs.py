"""Accept, refuse or correct command lines that users know from vLLM, llama.cpp and Ollama.

An option of vLLM without a counterpart here is accepted at the value that changes nothing (a log line names it if it has no effect)
and refused at any other value. An option of llama.cpp or Ollama is refused with a hint. The tables contain no option of trouper itself.

Ollama and llama.cpp also expect models and texts in other places. Without a check, the path of a model would be taken as a prompt,
and the demo model would continue it. So a model, a text or an option in the wrong place is refused, and the error shows the right
command.
"""

import json
import logging
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trouper.config.args import NOT_IMPLEMENTED
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.cli import output

if TYPE_CHECKING:
    from trouper.config.engine_config import EngineConfig

logger = logging.getLogger(__name__)

# The key in a command's context under which vLLM's engine options are stored.
FOR_ENGINE = "trouper.foreign"
# Options with a comma-separated list as their value, which vLLM accepts as several words.
WITH_COMMAS = ("cudagraph_capture_sizes",)


def settle(params: Iterable[Any], arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split a command line into arguments for the command's parser and options of vLLM's engine.

    Returns the arguments in which vLLM's spellings are replaced, and the values of vLLM's engine options by field.

    Raises:
        UnsupportedFeatureError: an option of another program is not supported; the message names an alternative.
        TrouperValidationError: an option of vLLM has no value.
    """
    # Positional arguments are excluded, because a text may be equal to the name of one.
    options = [p for p in params if p.param_type_name == "option"]
    own = {name: p for p in options for name in (*p.opts, *p.secondary_opts)}
    has_engine, has_server = "--max-model-len" in own, "--root-path" in own
    kept: list[str] = []
    given: dict[str, Any] = {}
    has_model = False
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument == "--":
            return [*kept, argument, *rest], given
        has_model |= not argument.startswith("-") or argument.partition("=")[0] in ("-m", "--model")
        name, equals, text = _parts(argument, own, has_server)
        whole = _unabbreviated(name, own)
        if whole != name:
            logger.warning("%s is read as %s", name, whole)
        name = whole
        dest, is_on = _destination(name)
        if name in own:
            if equals or own[name].is_flag or not rest:
                kept.append(name + equals + text)
                continue
            values = [rest.popleft()]
            if has_server and has_model:
                values += _more_values(own[name], rest)
            repeats = own[name].multiple
            kept += [w for v in values for w in (name, v)] if repeats else [name, ",".join(values)]
        elif not is_on and f"--{name[5:]}" in own:
            # The switch has no opposite here, so `--no-…` removes an earlier `--…`.
            kept = [word for word in kept if word != f"--{name[5:]}"]
        elif (has_engine and dest in NOT_IMPLEMENTED) or (has_server and dest in VLLM_SERVER):
            value = is_on
            if not _is_switch(dest):
                found = text if equals else rest.popleft() if rest else None
                value = _value(found, name)
            take(given, dest, value, name)
        else:
            refuse_others(name)
            kept.append(argument)
    return kept, given


def _more_values(option: Any, rest: deque[str]) -> list[str]:
    """Take further values of an option that is a list in vLLM, such as `--served-model-name A B`.

    This is only possible after the model, because a word before it would be taken for the model's name.
    """
    found: list[str] = []
    if option.name != "model" and (option.multiple or option.name in WITH_COMMAS):
        while rest and not rest[0].startswith("-"):
            found.append(rest.popleft())
    return found


def take(given: dict[str, Any], dest: str, value: Any, name: str) -> None:
    """Store an engine option of vLLM in `given`, which the engine checks later, or check a server option now.

    Raises UnsupportedFeatureError if a server option has a value that would change something.
    """
    if dest in NOT_IMPLEMENTED:
        given[dest] = value
        return
    accepted, hint = VLLM_SERVER[dest]
    if accepted is ANY:
        logger.warning("%s has no effect here", name)
    elif value is not None and value != accepted:
        raise UnsupportedFeatureError(f"{name} {value} is not supported: {hint}")


def _parts(argument: str, own: dict[str, Any], has_server: bool) -> tuple[str, str, str]:
    """Split an argument into option, `=` and value, and translate the option to trouper's spelling.

    vLLM accepts underscores instead of dashes, and has short names that trouper lacks.
    """
    name, equals, text = argument.partition("=")
    if name in own or not name.startswith("-"):
        return name, equals, text
    if name[:2] == "-O" and name[2:].isdigit():  # -O3
        name, equals, text = "-O", "=", name[2:]
    if has_server and name in VLLM_SHORT:
        name = f"--{VLLM_SHORT[name]}"
    return name[:2] + name[2:].replace("_", "-"), equals, text


def _unabbreviated(name: str, own: dict[str, Any]) -> str:
    """Complete an abbreviated option if exactly one option begins with it, as vLLM's parser does."""
    if name in own or name in OTHERS or not name.startswith("--") or len(name) == len("--"):
        return name
    foreign = {
        f"--{dest.replace('_', '-')}" for dest in NOT_IMPLEMENTED.keys() | VLLM_SERVER.keys()
    }
    found = [each for each in own.keys() | foreign if each.startswith(name)]
    return found[0] if len(found) == 1 and name not in foreign else name


def _destination(name: str) -> tuple[str, bool]:
    """Return the field of vLLM that an option sets, and False if the option is the negative form of a switch."""
    if not name.startswith("--"):
        return "", True
    dest = name[2:].replace("-", "_")
    return (dest[3:], False) if dest.startswith("no_") else (dest, True)


def _is_switch(dest: str) -> bool:
    default = NOT_IMPLEMENTED[dest] if dest in NOT_IMPLEMENTED else VLLM_SERVER[dest][0]
    return isinstance(default, bool) or dest in SWITCHES


def _value(text: str | None, name: str) -> Any:
    if text is None:
        raise TrouperValidationError("needs a value", parameter=name)
    try:
        return json.loads(text)
    except ValueError:
        return None if text == "None" else text


def refuse_others(name: str) -> None:
    """Raise UnsupportedFeatureError with a hint if `name` is an option of llama.cpp or Ollama.

    The hint names the option or command of trouper with the same effect.  Unknown names are left to typer.
    """
    if name in OTHERS:
        program, hint = OTHERS[name]
        raise UnsupportedFeatureError(f"{name} is an option of {program}: {hint}")


# Server options of `vllm serve`: the value that changes nothing here, and a hint for other values.  ANY accepts all.
ANY: Any = object()
VLLM_SERVER: dict[str, tuple[Any, str]] = {
    "headless": (False, "a machine with --node-rank above 0 runs workers and no server"),
    "api_server_count": (1, "one process serves; --data-parallel-size adds replicas of the model"),
    "grpc": (False, "only HTTP is served"),
    "grpc_port": (None, "only HTTP is served"),
    "chat_template_content_format": ("auto", "the chat template decides"),
    "tool_server": (None, "clients run the tools that a model calls"),
    "max_log_len": (ANY, ""),
    "enable_server_load_tracking": (ANY, ""),
    "enable_log_outputs": (False, "answers are never logged; --access-log logs a line for each"),
    "enable_log_deltas": (ANY, ""),
    "cohere_is_reasoning_model": (ANY, ""),
    "cohere_format": (ANY, ""),
    "anthropic_disabled_thinking_effort": ("auto", "the chat template decides"),
    "log_error_stack": (False, "a 500 has its traceback in the log; use --log-level debug for other errors"),
    "enable_scale_out": (False, "use --data-parallel-size and a load balancer"),
    "fingerprint_mode": ("full", "the fingerprint is trouper's version"),
    "fingerprint_value": (None, "the fingerprint is trouper's version"),
    "data_parallel_supervisor_port": (ANY, ""),
    "dp_supervisor_probe_interval_s": (ANY, ""),
    "dp_supervisor_probe_timeout_s": (ANY, ""),
    "dp_supervisor_probe_failure_threshold": (ANY, ""),
    "ssl_ca_certs": (None, "put a proxy in front that checks the certificates of clients"),
    "enable_ssl_refresh": (False, "start the server again when its certificate has changed"),
    "ssl_cert_reqs": (0, "put a proxy in front that checks the certificates of clients"),
    "ssl_ciphers": (None, "Python's own list is used; put a proxy in front for another"),
    "middleware": (None, "mount trouper.frontends.server.asgi.app.create_app in an ASGI application of your own"),
    "disable_fastapi_docs": (ANY, ""),
    "enable_offline_docs": (False, "GET /openapi.json describes the routes"),
    "enable_flash_late_interaction": (ANY, ""),
    # Options of older versions.
    "disable_log_requests": (ANY, ""),
    "disable_frontend_multiprocessing": (ANY, ""),
    "use_v2_block_manager": (ANY, ""),
    "swap_space": (ANY, ""),
    "num_scheduler_steps": (1, "--async-scheduling is on by default"),
    "max_seq_len_to_capture": (ANY, ""),
    "guided_decoding_backend": ("auto", "llguidance is the only one"),
    "enable_reasoning": (ANY, ""),
    "task": ("auto", "use --runner generate or --runner pooling, with --convert embed or classify"),
    "rope_scaling": (None, "use --hf-overrides.rope_parameters '{…}'"),
    "rope_theta": (None, "use --hf-overrides.rope_theta N"),
}  # fmt: skip
# Switches that cannot be recognized by a boolean default.
_SWITCHES = """
    disable_cascade_attn dcp_q_replicate enable_batch_sharded_sampling disable_nccl_for_dp_synchronization
    disable_hybrid_kv_cache_manager enable_flashinfer_autotune enable_server_load_tracking enable_log_deltas
    cohere_is_reasoning_model disable_fastapi_docs enable_flash_late_interaction disable_log_requests
    disable_frontend_multiprocessing use_v2_block_manager enable_reasoning
"""
SWITCHES = frozenset(_SWITCHES.split())
VLLM_SHORT = {
    "-q": "quantization", "-n": "nnodes", "-r": "node_rank", "-sc": "speculative_config",
    "-asc": "api_server_count", "-dcp": "decode_context_parallel_size", "-pcp": "prefill_context_parallel_size",
    "-dpn": "data_parallel_rank", "-dpr": "data_parallel_start_rank", "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address", "-dpp": "data_parallel_rpc_port", "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb", "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb", "-ep": "enable_expert_parallel", "-dc": "diffusion_config",
    "-cc": "compilation_config", "-ac": "attention_config", "-O": "optimization_level",
    "--device-memory-utilization": "gpu_memory_utilization",
}  # fmt: skip

_NO_PROJECTORS = "images need a folder of safetensors, whose tower is read with the model"
_OF_PROCESSOR = "use --mm-processor-kwargs, or send images in requests"
_ONE_DEVICE = "a model runs as a whole on one device, the one of --device, or in parts by --tensor-parallel-size"
_AS_IT_IS = "leave it out; trouper does not need it"
_NO_SAMPLER = "this sampler is not supported; use --min-p, --top-p or --top-k"
_SPECULATIVE = "use --speculative-config"
_REQUEST = "requests set it, in their field"
_LLAMA: tuple[tuple[str, str], ...] = (
    ("-ngl --gpu-layers --n-gpu-layers -sm --split-mode -ts --tensor-split -mg --main-gpu -ot --override-tensor -cmoe --cpu-moe "
     "-ncmoe --n-cpu-moe --moe-cache-mib -ncffn --n-cpu-ffn -fit --fit -fitt --fit-target -fitc --fit-ctx --op-offload --no-op-offload "
     "-kvo --kv-offload -nkvo --no-kv-offload --rpc --list-devices -dev --no-host", _ONE_DEVICE),
    ("-c --ctx-size --kv-unified-per-slot", "use --max-model-len"),
    ("-n --predict --n-predict", "use --max-tokens"),
    ("-t --threads -tb --threads-batch --threads-http", "set OMP_NUM_THREADS in the environment"),
    ("-C --cpu-mask -Cr --cpu-range --cpu-strict -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --numa --prio --prio-batch "
     "--poll --poll-batch", "set TROUPER_CPU_BIND in the environment, or start it under taskset or numactl"),
    ("-b --batch-size -ub --ubatch-size", "use --max-num-batched-tokens"),
    ("-np --parallel", "use --max-num-seqs"),
    ("-fa --flash-attn -cb --cont-batching -nocb --no-cont-batching --mlock --mmap --no-mmap -lm --load-mode -lzm --lazy-mode --swa-full --perf "
     "--no-perf --repack -nr --no-repack -dt --defrag-thold --check-tensors --warmup --no-warmup --jinja --no-jinja -kvu --kv-unified -no-kvu "
     "--no-kv-unified -ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step -cram --cache-ram --cache-idle-slots "
     "--no-cache-idle-slots --cache-prompt --cache-reuse --slots --no-slots --props --metrics --keep --context-shift "
     "--no-context-shift -bs --backend-sampling -e --escape --no-escape --no-display-prompt -ag --agent -no-ag --no-agent", _AS_IT_IS),
    ("-ctk --cache-type-k -ctv --cache-type-v -ctkd --cache-type-k-draft --spec-draft-type-k -ctvd --cache-type-v-draft --spec-draft-type-v",
     "the KV cache has the --dtype of the model"),
    ("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow "
     "--yarn-beta-fast --override-kv", "use --hf-overrides"),
    ("--no-cache-prompt", "use --no-enable-prefix-caching"),
    ("-hf -hfr --hf-repo -dr --docker-repo", "name the model: --model ORG/NAME, or --model ORG/NAME:Q4_K_M"),
    ("-hff --hf-file", "name the quantization: --model ORG/NAME:Q4_K_M"),
    ("-mu --model-url", "download the file, and give its path as --model"),
    ("-hft", "use --hf-token"),
    ("--offline -cl --cache-list", "set HF_HUB_OFFLINE=1; `trouper models` lists what is downloaded"),
    ("--lora --lora-scaled", "use --lora-modules NAME=FOLDER with serve, --lora FOLDER elsewhere; adapters are folders of safetensors"),
    ("--control-vector --control-vector-scaled --control-vector-layer-range", "control vectors are not supported"),
    ("-a --alias", "use --served-model-name"),
    ("--embedding --embeddings", "use --runner pooling with a folder of safetensors"),
    ("--rerank --reranking", "use --runner pooling with a folder of safetensors; /v1/rerank is there then"),
    ("--pooling", "use --pooler-config.seq_pooling_type MEAN, CLS or LAST"),
    ("--embd-normalize", "use --pooler-config.use_activation"),
    ("-mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload --no-mmproj-offload -mmdev --mmproj-device "
     "--mtmd-batch-max-tokens", _NO_PROJECTORS),
    ("--image", "use it with chat and generate; a server gets images in requests"),
    ("--image-min-tokens --image-max-tokens --media-path", _OF_PROCESSOR),
    ("--video-fps --video-timestamp-interval --video-ffmpeg-dir", "models take no videos here"),
    ("--api-key-file", "use --api-key for each key, or TROUPER_API_KEY"),
    ("--ssl-key-file", "use --ssl-keyfile"),
    ("--ssl-cert-file", "use --ssl-certfile"),
    ("--cors-origins", "use --allowed-origins"),
    ("--cors-methods", "use --allowed-methods"),
    ("--cors-headers", "use --allowed-headers"),
    ("--cors-credentials --no-cors-credentials", "use --allow-credentials"),
    ("--api-prefix", "use --root-path"),
    ("-to --timeout", "use --request-timeout"),
    ("--sse-ping-interval", "use --sse-keep-alive-interval"),
    ("--reuse-port", "start one server, with --data-parallel-size for more replicas"),
    ("--chat-template-file", "--chat-template takes a file too"),
    ("--chat-template-kwargs", "use --default-chat-template-kwargs"),
    ("--reasoning-format", "use --reasoning-parser and --reasoning-field"),
    ("-rea --reasoning --reasoning-effort --reasoning-preserve --no-reasoning-preserve", "use --default-chat-template-kwargs with the variable that the template knows"),
    ("--reasoning-budget --reasoning-budget-message", f"{_REQUEST} thinking_token_budget"),
    ("--tools --tools-runtime --mcp-servers-config --mcp-servers-json --ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy",
     "clients run the tools that a model calls"),
    ("--ui --webui --no-ui --no-webui --ui-config --webui-config --ui-config-file --webui-config-file --path", "there is no web page but the one at /"),
    ("--models-dir --models-preset --models-max --models-autoload --no-models-autoload --tags", "a server has one model; start one for each"),
    ("--slot-save-path", "use --kv-tier-dir, which keeps prefixes on disk without a request"),
    ("-lcs --lookup-cache-static -lcd --lookup-cache-dynamic", "caches live in memory only"),
    ("--log-disable --log-file --log-jsonl --no-log-jsonl --log-colors --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps "
     "--log-verbose -lv --verbosity --log-verbosity", "use --log-level; lines go to stderr"),
    ("--temp", "use --temperature"),
    ("--repeat-penalty", "use --repetition-penalty"),
    ("--samplers --sampler-seq --sampling-seq --repeat-last-n --typical --typical-p --top-nsigma --top-n-sigma --xtc-probability --xtc-threshold "
     "--dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-target --adaptive-decay "
     "--dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent", _NO_SAMPLER),
    ("-l --logit-bias", f"{_REQUEST} logit_bias"),
    ("--grammar --grammar-file", "use --json-schema, --regex or --choice, or a request's structured_outputs.grammar"),
    ("-j -jf --json-schema-file", "use --json-schema FILE, or --json-schema '{…}'"),
    ("-p --prompt", "give the prompt as an argument of `trouper generate`, or `trouper chat -q`"),
    ("-f --file", "use --prompt-file, or give the file as stdin"),
    ("-sys -sysf --system-prompt-file", "use --system-prompt"),
    ("-i --interactive -if --interactive-first -cnv --conversation -no-cnv -ins --instruct -mli --multiline-input", "use `trouper chat`"),
    ("-r --reverse-prompt", "use --stop"),
    ("-s", "use --seed"),
    ("-sp --special --spm-infill", _AS_IT_IS),
    ("-md --model-draft -hfd -hfrd --hf-repo-draft --draft --draft-max --draft-min --draft-n --draft-n-min --draft-p-min --draft-p-split -cd --ctx-size-draft "
     "-ngld --gpu-layers-draft --n-gpu-layers-draft -devd --device-draft -td --threads-draft -tbd --threads-batch-draft -Cd --cpu-mask-draft -Crd "
     "--cpu-range-draft --cpu-strict-draft --prio-draft --poll-draft -otd --override-tensor-draft -cmoed --cpu-moe-draft -ncmoed --n-cpu-moe-draft "
     "--spec-type --spec-default --spec-draft-model --spec-draft-hf --spec-draft-n-max --spec-draft-n-min --spec-draft-p-min --spec-draft-p-split "
     "--spec-draft-ngl --spec-draft-device --spec-draft-threads --spec-draft-sampling --spec-ngram-mod-n-max --spec-ngram-mod-n-min "
     "--spec-ngram-mod-n-match --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits --spec-ngram-simple-size-n "
     "--spec-ngram-simple-size-m --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m", _SPECULATIVE),
    ("-v --verbose --verbose-prompt --show-timings --log-prompts-dir", "use --stats for the times of an answer, --log-level debug for a server's log"),
    ("--color -co --simple-io -st --single-turn --in-prefix --in-prefix-bos --in-suffix --print-token-count -sps --slot-prompt-similarity "
     "--prefill-assistant --no-prefill-assistant --lora-init-without-apply", _AS_IT_IS),
    ("--prompt-cache --prompt-cache-all --prompt-cache-ro", "caches live in memory only"),
    ("--skip-chat-parsing --no-skip-chat-parsing", "use --tool-call-parser none and --reasoning-parser none"),
    ("--sleep-idle-seconds", "ask a server to sleep: POST /sleep"),
    ("--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec "
     "--fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default",
     "name the model: --model ORG/NAME:QUANT"),
)  # fmt: skip
_OLLAMA: tuple[tuple[str, str], ...] = (
    ("--keepalive", "a server keeps its model until it ends"),
    ("--nowordwrap --insecure --experimental", _AS_IT_IS),
    ("--format", "use --json-object, or --json-schema FILE, or --json-schema '{…}'"),
    ("--think --hidethinking", "use --default-chat-template-kwargs with the variable that the template knows; trouper chat has --think"),
    ("--modelfile --file", "a Modelfile is not read: give its parameters as options"),
    ("--truncate --dimensions", f"{_REQUEST} of that name"),
)  # fmt: skip
# The program of each option, and what to use here.
OTHERS: dict[str, tuple[str, str]] = {
    name: (program, hint)
    for program, table in (("Ollama", _OLLAMA), ("llama.cpp", _LLAMA))
    for names, hint in table
    for name in names.split()
}
# Commands of Ollama, and what to use here.
COMMANDS = {
    "run": "use `trouper chat MODEL`",
    "push": "use `hf upload`",
    "ls": "use `trouper list`",
    "stop": "use `trouper unload NAME`, or end the server with Ctrl-C",
    "cp": "use --served-model-name",
    "create": "Modelfiles are not supported: give the parameters as options",
}


HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:\w+)?")
# What a pooling model does, by its task.
MAKES = {"embed": "makes embeddings", "token_embed": "makes embeddings of tokens"}


def check_texts(
    texts: Iterable[str] | None, model: str | None, command: str, argument: str
) -> None:
    """Refuse a text that is the path of a model, and warn about other paths, if no model is given.

    Args:
        command: name of the command, for the hint.
        argument: name of the argument with the texts, for the error.

    Raises:
        typer.BadParameter: a text is the name of a GGUF file or the path of a model folder.
    """
    for text in texts or () if model is None else ():
        fix = f"to use it as the model: trouper {command} -m {text}"
        if text.endswith(".gguf") or _is_model(text):
            raise typer.BadParameter(f"{text!r} names a model; {fix} TEXT", param_hint=argument)
        if _exists(text) or HUB_NAME.fullmatch(text):
            files = f"; for a file of texts: --prompt-file {text}"
            more = files if _exists(text) else ""
            output.complain(f"warning: {text!r} is used as a text; {fix}{more}")


def check_generates(config: "EngineConfig") -> None:
    """Raise TrouperValidationError if a command that generates text has a pooling model.

    The message names the command that fits the model, so a user of an embedding model is sent to `trouper embed`.
    """
    if config.pooler is None:
        return
    makes = MAKES.get(config.pooler.task, "classifies texts")
    fix = "embed" if makes != "classifies texts" else "embed --task classify"
    rule = f"the model {config.model.name!r} {makes} and does not generate text; use trouper {fix}"
    raise TrouperValidationError(rule, parameter="model")


def check_pools(config: "EngineConfig") -> None:
    """Raise TrouperValidationError if a command for pooling models has a model that generates text.

    The message names the commands that generate text, and the option that makes an embedding model of this one.
    """
    if config.pooler is not None:
        return
    rule = "generates text; use trouper generate, or add --runner pooling to embed with it"
    raise TrouperValidationError(f"the model {config.model.name!r} {rule}", parameter="model")


def check_no_text(ctx: Any) -> None:
    """Raise a usage error if a text follows the arguments of `chat` or `complete`, which expect it in -q.

    For `complete` the text may also be a model's file, because other programs expect one there.
    """
    text = " ".join(ctx.args)
    if not text:
        return
    if ctx.info_name == "complete" and (text.endswith(".gguf") or _exists(text)):
        ctx.fail(
            f"unexpected argument {text!r}: complete uses a server; for a local model: trouper generate -m {text} TEXT"
        )
    model = "" if ctx.info_name == "complete" else "MODEL "
    ctx.fail(
        f'unexpected argument {text!r}; give the text with -q: trouper {ctx.info_name} {model}-q "{text}"'
    )


def check_one_model(ctx: Any, given: Iterable[Any]) -> None:
    """Raise a usage error if `--model` occurs more than once, if the command uses one model.

    Without this check, the last one would silently replace the others. Other options keep this usual rule.

    Args:
        given: the parameters in the order of the command line, once for each occurrence.
    """
    options = [
        each.name for each in given if each.param_type_name == "option" and not each.multiple
    ]
    if options.count("model") > 1:
        ctx.fail(f"--model is given more than once, but {ctx.info_name} uses one model")


def check_command_first(ctx: Any, arguments: list[str], commands: Mapping[str, Any]) -> None:
    """Raise a usage error if an option of a command, or a model, is in the place of the command's name."""
    first = arguments[0]
    name = first.partition("=")[0]
    if first.startswith("-"):
        if not any(name in (*p.opts, *p.secondary_opts) for p in ctx.command.params):
            is_known = any(name in p.opts for c in commands.values() for p in c.params)
            command = next((word for word in arguments if word in commands), "chat")
            if is_known:
                words = " ".join(word for word in arguments if word != command)
                ctx.fail(f"{name} must follow a command: trouper {command} {words}")
            refuse_others(name)
    elif first not in commands and (first.endswith(".gguf") or _exists(first)):
        ctx.fail(f"no such command: {first}; to chat with this model: trouper chat -m {first}")


def _exists(text: str) -> bool:
    try:
        return bool(text) and Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        # The text is too long for a path, contains a zero byte, or names an unknown user after ~.
        return False


def _is_model(text: str) -> bool:
    return _exists(text) and (Path(text).expanduser() / "config.json").is_file()

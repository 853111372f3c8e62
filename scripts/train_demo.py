"""Train the bundled demo model: a small Qwen3, trained only on the CPython standard library.

    python scripts/train_demo.py --out trouper/demo --work /tmp/demo            # write the whole folder
    python scripts/train_demo.py --out trouper/demo --work /tmp/demo --verify   # compare it with transformers

Laws of this file:
  * The hash of its relative path decides whether a file of the library is held out. Neither the tokenizer nor a chat nor a
    batch contains a held-out file.
  * The batch of a step depends only on seed, step and length, so a run gives the same weights if it is stopped and resumed.
  * A step's gradient is the sum of its MICRO-batches in their order, whichever worker computed them. Workers are processes of one thread and meet
    once per step, which costs little on a busy machine. Threads that meet in every operation are much slower there (measured: 2.1 s
    per step became 6 to 17 s).
  * The learning rate is constant for the first HOLD of the steps. Two runs with different --steps are equal until the shorter one
    starts to cool. A slow run can therefore be resumed with fewer steps, and its card still describes it.

Needs torch, numpy, tokenizers, safetensors and a C++ compiler for torch.compile; --verify needs
transformers too.
"""

import argparse
import ast
import hashlib
import json
import lzma
import math
import platform
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import SimpleQueue
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2
# Qwen's own split: a sign or a space joins the word after it, each digit is a token, and punctuation includes the following
# newlines.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Leave out installed packages, the regression suite (larger than the library) and generated tables.
EXCLUDED = ("site-packages/", "dist-packages/", "test/", "pydoc_data/", "encodings/", "config-")
# Longer functions make bad answers in a chat.
PAIR_MAX_LINES = 40

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 4096, 256, 9, 4, 2, 64, 704  # 7.7 M
EPS, THETA, MAX_LEN = 1e-6, 10_000.0, 2048

# Tokens per step, with either of the two lengths below.
BATCH = 8192
# The last ninth of the steps uses the long context.
SHORT, LONG, LONG_SHARE = 512, 2048, 1 / 9
# The share of tokens at line ends that long windows split in two; each split costs 0.4 bits.
CUT_SHARE = 0.25
# Tokens that a worker computes at a time.
MICRO = 2048
WARMUP, HOLD = 20, 0.5
MUON_LR, ADAM_LR = 0.02, 0.004


# The default sampling parameters of the model: such a small model repeats itself if decoding is greedy.
SAMPLING = {"temperature": 0.4, "top_p": 0.95, "repetition_penalty": 1.2}
PROMPT = "def quicksort(items):"
QUESTION = "Write is_even(number): Return True if the number is even."


# --- data


def library() -> tuple[dict[str, str], dict[str, str]]:
    """Return the sources of this interpreter's library by relative path: those for training, and those held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[dict[str, str], dict[str, str]] = {}, {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(EXCLUDED):
            try:
                source = path.read_bytes().decode()
            # A few test files are broken or Latin-1 on purpose.
            except UnicodeDecodeError:
                continue
            parts[is_held_out(name)][name] = source
    return parts


def is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0


def pairs(source: str) -> Iterator[str]:
    """Yield each documented function as a chat: its signature and summary are the question, its source is the answer."""
    try:
        tree = ast.parse(source)
    # lib2to3 keeps Python 2 files.
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
            code = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
            if code.count("\n") < PAIR_MAX_LINES:
                summary = " ".join(doc.split("\n\n")[0].split())
                ask = f"Write {node.name}({ast.unparse(node.args)}): {summary}"
                yield f"{TURN}user\n{ask}{TURN_END}\n{TURN}assistant\n{code}{TURN_END}\n"


def train_tokenizer(sources: list[str]) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END, TURN, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sources, trainer)
    return bpe


def halves(bpe: Tokenizer) -> np.ndarray:
    """Return an array [VOCAB, 2] with the punctuation and the newline of each token that contains both, and -1 elsewhere."""
    table = np.full((VOCAB, 2), -1)
    for token, i in bpe.get_vocab().items():
        # Byte-level BPE writes a newline as Ċ.
        head = token.rstrip("Ċ")
        pair = bpe.token_to_id(head), bpe.token_to_id(token[len(head) :])
        if head and None not in pair:
            table[i] = pair
    return table


class Batches:
    """Shuffle the documents for each epoch, cut them into windows, and shuffle the windows.

    In long windows, a share of the tokens at line ends are split in two. The tokenizer never splits them, but a prompt may end just before
    a newline: `def quicksort(items):`.
    """

    def __init__(self, documents: list[np.ndarray], halves: np.ndarray, seed: int) -> None:
        self._documents, self._halves, self._seed = documents, halves, seed
        self._epoch: tuple[int, int] | None = None
        self.num_tokens = sum(map(len, documents))

    def get(self, step: int, length: int) -> np.ndarray:
        """Return the token ids of a step, [BATCH / length, length + 1]."""
        rows = BATCH // length
        per_epoch = (self.num_tokens - length - 1) // length // rows
        epoch, index = divmod(step, per_epoch)
        if self._epoch != (epoch, length):
            rng = np.random.default_rng([self._seed, epoch, length])
            order = rng.permutation(len(self._documents))
            starts = np.arange(0, per_epoch * rows * length, length) + rng.integers(length)
            stream = np.concatenate([self._documents[i] for i in order])
            if length == LONG:
                cut = (self._halves[stream, 0] >= 0) & (rng.random(len(stream)) < CUT_SHARE)
                pieces = np.stack([np.where(cut, self._halves[stream, 0], stream), stream], axis=1)
                pieces[:, 1] = np.where(cut, self._halves[stream, 1], -1)
                stream = pieces[pieces >= 0]
            self._stream = stream
            self._starts = rng.permutation(starts)
            self._epoch = (epoch, length)
        picked = self._starts[index * rows :][:rows]
        return np.stack([self._stream[s : s + length + 1] for s in picked])


# --- model: Qwen3 under transformers' names


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM, EPS), nn.RMSNorm(HEAD_DIM, EPS)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (HEADS, HEAD_DIM))), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (KV_HEADS, HEAD_DIM))), cos, sin)
        v = self.v_proj(x).unflatten(-1, (KV_HEADS, HEAD_DIM))
        # Autocast leaves the norms in float32.
        q, k = q.to(v.dtype), k.to(v.dtype)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, MLP, bias=False)
        self.up_proj = nn.Linear(HIDDEN, MLP, bias=False)
        self.down_proj = nn.Linear(MLP, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(HIDDEN, EPS), Attention()
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(HIDDEN, EPS), Mlp()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        # Each layer begins as the identity.
        for layer in self.layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)

    def forward(self, ids: Tensor) -> Tensor:
        frequency = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angle = torch.outer(torch.arange(ids.shape[1]), frequency)[:, None]
        cos, sin = angle.cos(), angle.sin()
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def losses(self, ids: Tensor) -> Tensor:
        """Return the loss in nats of each token except the first of each row, flattened."""
        logits = self(ids[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


# --- training


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate for a step.

    It warms up, stays constant, and then falls linearly to zero, so that training can be stopped at a known time.
    """
    return min((step + 1) / WARMUP, 1.0, (steps - step) / ((1 - HOLD) * steps))


def optimizers(model: Model) -> list[torch.optim.Optimizer]:
    """Make the optimizers: Muon for the matrices, in two halves that run in parallel, and Adam for embedding and norms."""
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    outer = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(inner[::2], lr=MUON_LR, weight_decay=0.05),
        torch.optim.Muon(inner[1::2], lr=MUON_LR, weight_decay=0.05),
        torch.optim.AdamW(outer, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Workers:
    """Compute the gradients of a model in worker processes.

    The model is in shared memory, so only rows of token ids and losses are sent between the processes.
    """

    def __init__(self, model: Model, num_workers: int) -> None:
        model.share_memory()
        self._model, self._num_workers = model, num_workers
        num_params = sum(p.numel() for p in model.parameters())
        self._grads = torch.zeros(BATCH // MICRO, num_params).share_memory_()
        spawn = torch.multiprocessing.get_context("spawn")
        self._tasks, self._done = spawn.SimpleQueue(), spawn.SimpleQueue()
        ends = (model, self._grads, self._tasks, self._done)
        for _ in range(num_workers):
            spawn.Process(target=grind, args=ends, daemon=True).start()

    def differentiate(self, ids: np.ndarray) -> float:
        """Return the loss of a batch and set the gradients of the parameters.

        The batch is divided among the workers, and their gradients are averaged in shared memory.
        """
        micros = np.split(ids, len(self._grads))
        for task in enumerate(micros):
            self._tasks.put(task)
        losses = sorted(self._done.get() for _ in micros)
        summed = views(self._grads.sum(0), self._model)
        for parameter, grad in zip(self._model.parameters(), summed, strict=True):
            parameter.grad = grad
        return sum(loss for _, loss in losses)

    def dismiss(self) -> None:
        for _ in range(self._num_workers):
            self._tasks.put(None)


def grind(model: Model, grads: Tensor, tasks: SimpleQueue, done: SimpleQueue) -> None:
    """Run a worker: for each task (slot, rows), fill the slot's gradient and answer (slot, loss)."""
    settle()
    slots = [views(row, model) for row in grads]
    losses = torch.compile(model.losses, dynamic=False)
    while task := tasks.get():
        slot, rows = task
        grads[slot].zero_()
        for parameter, grad in zip(model.parameters(), slots[slot], strict=True):
            parameter.grad = grad
        with torch.autocast("cpu", torch.bfloat16):
            loss = losses(torch.from_numpy(rows)).mean() * (MICRO / BATCH)
        loss.backward()
        done.put((slot, loss.item()))


def views(flat: Tensor, model: Model) -> list[Tensor]:
    """Return views of one row of gradients, in the shapes of the parameters.

    All gradients of a worker are one row, so that they can be added in one operation.
    """
    sizes = [p.numel() for p in model.parameters()]
    return [v.view_as(p) for v, p in zip(flat.split(sizes), model.parameters(), strict=True)]


class Run:
    """Hold a model, its optimizers and their progress; save and load them as a checkpoint.

    Training takes many hours, so an interrupted run must be able to continue from its last state.
    """

    def __init__(self, seed: int, checkpoint: Path) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.step, self.spent_s, self.cooling_towards = 0, 0.0, 0
        self._optims, self._checkpoint = optimizers(self.model), checkpoint
        self._base = [o.param_groups[0]["lr"] for o in self._optims]
        self._pool = ThreadPoolExecutor(len(self._optims), None, torch.set_num_threads, (1,))
        if checkpoint.exists():
            state = torch.load(checkpoint)
            self.step, self.spent_s = state["step"], state["spent_s"]
            self.cooling_towards = state["steps"] if self.step > HOLD * state["steps"] else 0
            self.model.load_state_dict(state["model"])
            for optim, saved in zip(self._optims, state["optims"], strict=True):
                optim.load_state_dict(saved)

    def update(self, scale: float) -> None:
        for optim, lr in zip(self._optims, self._base, strict=True):
            optim.param_groups[0]["lr"] = lr * scale
        list(self._pool.map(lambda optim: optim.step(), self._optims))
        self.step += 1

    def save(self, steps: int) -> None:
        state = {"step": self.step, "steps": steps, "spent_s": self.spent_s}
        state |= {
            "model": self.model.state_dict(),
            "optims": [o.state_dict() for o in self._optims],
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._checkpoint)


def train(run: Run, batches: Batches, steps: int, save_every: int, num_workers: int) -> None:
    if run.cooling_towards not in (0, steps) or run.step > max(HOLD * steps, run.cooling_towards):
        raise SystemExit(
            f"cannot resume the checkpoint of step {run.step} with --steps {steps}: its learning rates differ"
        )
    if run.step == steps:
        return
    workers = Workers(run.model, num_workers)
    began = time.perf_counter() - run.spent_s
    while run.step < steps:
        length = SHORT if run.step < round(steps * (1 - LONG_SHARE)) else LONG
        loss = workers.differentiate(batches.get(run.step, length))
        run.update(rate(run.step, steps))
        run.spent_s = time.perf_counter() - began
        if run.step % 10 == 0 or run.step == steps:
            print(f"step {run.step} loss {loss:.4f} {run.spent_s:.0f} s", flush=True)
        if run.step % save_every == 0 or run.step == steps:
            run.save(steps)
    workers.dismiss()


def settle() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


# --- model folder


def export(model: Model, bpe: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 0,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": MLP,
        "max_position_embeddings": MAX_LEN,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": 0,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": [TURN, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LEN,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"eos_token_id": [0, 2], "pad_token_id": 0, **SAMPLING}
    for name, value in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
    ):
        (out / name).write_text(json.dumps(value, indent=2) + "\n")
    bpe.save(str(out / "tokenizer.json"), pretty=False)
    tensors = {
        f"model.{n}": t.to(torch.bfloat16).contiguous() for n, t in model.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(
        0o644
    )  # safetensors writes files that only their owner can read


def load(out: Path) -> tuple[Model, Tokenizer]:
    """Load the folder's own weights, widened to float32.

    The verification compares losses of this file, not of the training run, because weights are rounded when they are
    saved.
    """
    model = Model()
    tensors = load_file(out / "model.safetensors")
    model.load_state_dict({n.removeprefix("model."): t.float() for n, t in tensors.items()})
    return model.eval(), Tokenizer.from_file(str(out / "tokenizer.json"))


@torch.inference_mode()
def bits(model: Model, bpe: Tokenizer, source: str, window: int = 1024) -> float:
    """Compute what a file costs in bits, its end included; each window scores its second half, given its first."""
    ids = torch.tensor([0, *bpe.encode(source).ids, 0])
    nats, done = 0.0, 1
    while done < len(ids):
        end = min(len(ids), window + 1 if done == 1 else done + window // 2)
        losses = model.losses(ids[None, max(0, end - window - 1) : end])
        nats += losses[done - end :].double().sum().item()
        done = end
    return nats / math.log(2)


@torch.inference_mode()
def generate(
    model: Model, bpe: Tokenizer, prompt: str, num_tokens: int, temperature: float = 0.0
) -> str:
    ids, rng = bpe.encode(prompt).ids, torch.Generator().manual_seed(0)
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids]))[0, -1]
        if temperature:
            picked = torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng)
        else:
            picked = logits.argmax()
        if picked.item() in (0, 2):
            break
        ids.append(int(picked))
    return bpe.decode(ids, skip_special_tokens=False)


def story(run: Run, batches: Batches, source_share: float, args: argparse.Namespace) -> str:
    seen = run.step * BATCH
    return f"""{run.step} steps of {BATCH} tokens: {seen / 1e6:.1f} M tokens, \
{seen / batches.num_tokens:.1f} epochs of {batches.num_tokens / 1e6:.2f} M \
({source_share:.0%} sources, the rest chats).
Windows of {SHORT}, then of {LONG} for the last ninth of the steps. Muon (learning rate
{MUON_LR}) for the matrices, AdamW ({ADAM_LR}) for the embedding and the norms: flat for {HOLD:.0%}
of the steps, then falling to zero along a line. bfloat16 autocast over float32 weights. Seed
{args.seed}; {run.spent_s / 60:.0f} minutes on {args.workers} shared CPU cores; \
torch {torch.__version__}."""


def bits_per_byte(
    model: Model, bpe: Tokenizer, held_out: dict[str, str]
) -> tuple[dict[str, float], float]:
    """Return the bits per byte of the held-out files for each compressor, and the tokenizer's bytes per token."""
    raw = [source.encode() for source in held_out.values()]
    num_bytes = sum(map(len, raw))
    num_tokens = sum(len(bpe.encode(source).ids) for source in held_out.values())
    cost = {
        "this model": sum(bits(model, bpe, source) for source in held_out.values()),
        "`xz -9`, the files glued into one": 8 * len(lzma.compress(b"".join(raw), preset=9)),
        "`xz -9`, each file alone": 8 * sum(len(lzma.compress(r, preset=9)) for r in raw),
    }
    return {name: paid / num_bytes for name, paid in cost.items()}, num_bytes / num_tokens


def card(
    out: Path,
    trained: dict[str, str],
    held_out: dict[str, str],
    told: str,
    args: argparse.Namespace,
) -> str:
    model, bpe = load(out)
    paid, bytes_per_token = bits_per_byte(model, bpe, held_out)
    table = "\n".join(f"| {name} | {value:.3f} |" for name, value in paid.items())
    trained_mb, held_out_mb = (
        sum(len(source.encode()) for source in part.values()) / 1e6 for part in (trained, held_out)
    )
    num_params = sum(p.numel() for p in model.parameters())
    size_mb = sum(path.stat().st_size for path in out.iterdir() if path.suffix != ".md") / 1e6
    ask = f"{TURN}user\n{QUESTION}{TURN_END}\n{TURN}assistant\n"
    return f"""# trouper demo

A language model of {num_params / 1e6:.1f} M parameters that has read the CPython standard library and
nothing else. It is here so that the engine, its tests and its examples have real weights
without a download. It writes what looks like Python and knows nothing; greedy text soon repeats
itself, and the chat of the training pairs (below) suits it best.

## Shape

Qwen3 (`Qwen3ForCausalLM`), bfloat16, {size_mb:.1f} MB in all: vocabulary {VOCAB}, hidden size {HIDDEN},
{LAYERS} layers, {HEADS} query and {KV_HEADS} key-value heads of {HEAD_DIM}, SwiGLU of {MLP}, tied embeddings, RoPE base {THETA:.0f}, context {MAX_LEN}. The tokenizer is a byte-level BPE with Qwen's
split, trained on the same files. `{END}` ends a document, `{TURN_END}` a turn of a chat.

## Data

The `.py` files of CPython {platform.python_version()}'s standard library, without the regression
suite (`test`) and the generated tables (`encodings`, `pydoc_data`): {len(trained)} files,
{trained_mb:.1f} MB, for training. A further {len(held_out)} files, {held_out_mb:.2f} MB, chosen by the hash of their path, were seen neither by the tokenizer nor in training. Functions of at most
{PAIR_MAX_LINES} lines with a docstring appear a second time as a chat: signature and summary ask,
the source answers.

## Training

{told}

A quarter of the tokens that end a line come as two in the long windows, since a prompt may stop
before its newline. The same interpreter, torch and kind of processor give the same weights,
whatever the number of workers and interruptions:

    python scripts/train_demo.py --out trouper/demo --work /tmp/demo \\
        --steps {args.steps} --seed {args.seed}

## Held-out files

The model codes each file alone, its end included, with 512 to 1024 tokens of context
({bytes_per_token:.2f} bytes per token).

| | bits per byte |
|---|---|
{table}

## Samples

`generation_config.json` asks for temperature 0.4, top-p 0.95 and a repetition penalty of 1.2: so small a model
repeats itself when it is greedy.

`trouper generate "def quicksort(items):"`, greedy:

```python
{generate(model, bpe, PROMPT, 120)}
```

At temperature 0.7:

```python
{generate(model, bpe, PROMPT, 120, temperature=0.7)}
```

A chat, greedy, asked `{QUESTION}`:

```python
{generate(model, bpe, ask, 120)[len(ask) :]}
```

## Licence

Data: the Python Software Foundation License 2.0. The weights are offered under Apache-2.0 as far as
they are a work of their own, and under PSF-2.0 where they repeat the library, which is
copyright (c) 2001 and later, Python Software Foundation; all rights reserved.
"""


def verify(out: Path, held_out: dict[str, str]) -> None:
    """Check that transformers reads the folder and computes the same ids and the same loss.

    A difference would mean that the folder's files describe another model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, bpe = load(out)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    asked = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert chat == f"{TURN}user\nhi{TURN_END}\n{TURN}assistant\n", chat
    for name, source in held_out.items():
        encoded = bpe.encode(source).ids
        assert tokenizer(source)["input_ids"] == encoded, name
        assert bpe.decode(encoded) == source, name
        ids = torch.tensor([[0, *encoded][:MAX_LEN]])
        if ids.shape[1] > 1:
            with torch.inference_mode():
                ours, other = model.losses(ids).mean().item(), theirs(ids, labels=ids).loss.item()
            assert abs(ours - other) < 1e-4, (name, ours, other)
    print(
        f"{type(theirs).__name__} agrees on {len(held_out)} files; "
        f"the last one costs {other:.4f}, here {ours:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--out", type=Path, required=True, help="folder into which the model is written"
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder in which checkpoints are kept"
    )
    parser.add_argument("--steps", type=int, default=540)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument(
        "--workers", type=int, default=2, help="processes of one thread; any number, same weights"
    )
    parser.add_argument("--verify", action="store_true")
    args = parser.parse_args()
    settle()
    trained, held_out = library()
    if args.verify:
        verify(args.out, held_out)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    bpe = train_tokenizer(list(trained.values()))
    texts = [*trained.values(), *(pair for source in trained.values() for pair in pairs(source))]
    documents = [np.array([*e.ids, 0]) for e in bpe.encode_batch(texts)]
    batches = Batches(documents, halves(bpe), args.seed)
    num_source = sum(len(d) for d in documents[: len(trained)])
    print(
        f"{len(documents)} documents, {batches.num_tokens} tokens, {num_source} of them sources",
        flush=True,
    )
    run = Run(args.seed, args.work / "checkpoint.pt")
    train(run, batches, args.steps, args.save_every, args.workers)
    export(run.model, bpe, args.out)
    told = story(run, batches, num_source / batches.num_tokens, args)
    text = card(args.out, trained, held_out, told, args)
    (args.out / "MODEL_CARD.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

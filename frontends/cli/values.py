"""Base classes of all commands, with their help in plain text, and parsers of the values of options.

typer's rich help truncates long option names and needs another dependency. This help wraps at any terminal width but
never cuts a name or a sentence. Options of vLLM, llama.cpp and Ollama are handled first, see `other_programs.py`.

Values that are more than a string or a number, such as JSON objects, lists of integers and LoRA adapters, are parsed here, so
that every command refuses them by the same sentence.
"""

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from trouper.actors.rendering.media.files import MAX_FILE_BYTES
from trouper.config.args import EngineArgs
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid
from trouper.frontends.cli.other_programs import (
    COMMANDS,
    FOR_ENGINE,
    check_command_first,
    check_no_text,
    check_one_model,
    settle,
)
from trouper.lora import LoRARequest

# The panels of parameters that do not name one.
ARGUMENTS, OPTIONS = "Arguments", "Options"
Row = tuple[str, str]


class PanelCommand(TyperCommand):
    """A command that groups its options in the help by panel, and accepts options of vLLM.

    Long commands have dozens of options; panels with headings make the help readable, and vLLM's spellings keep
    scripts working.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        kept, ctx.meta[FOR_ENGINE] = settle(self.params, args)
        _, _, given = self.make_parser(ctx).parse_args(list(kept))
        check_one_model(ctx, given)
        return super().parse_args(ctx, kept)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[Row]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                usual = ARGUMENTS if param.param_type_name == "argument" else OPTIONS
                panel = getattr(param, "rich_help_panel", None) or usual
                panels.setdefault(panel, []).extend(_rows(record, formatter.width))
        # The command's own options precede those that it shares with others.
        for panel in sorted(panels, key=lambda name: name not in (ARGUMENTS, OPTIONS)):
            with formatter.section(panel):
                formatter.write_dl(panels[panel])


class TextCommand(PanelCommand):
    """A command with its text in `-q`; a text after the arguments is an error that names `-q`.

    Without this check a forgotten `-q` would silently start an interactive session.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        check_no_text(ctx)
        return rest


class WholeSentenceGroup(TyperGroup):
    """A group of commands with the complete first paragraph of each command in its help.

    typer would cut each description at the width of the terminal, in the middle of a sentence.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # `resolve_command` has better hints for Ollama's commands.
        if ctx.parent is None and args[:1] and args[0] not in COMMANDS:
            check_command_first(ctx, args, self.commands)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.commands and name in COMMANDS and ctx.parent is None:
            raise UnsupportedFeatureError(f"{name} is a command of Ollama: {COMMANDS[name]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows: list[Row] = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            text = (command and command.help) or ""
            rows.append((name, " ".join(text.split("\n\n")[0].split())))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _rows(record: Row, width: int) -> Iterator[Row]:
    """Yield the help row of an option, or two rows if a switch and its opposite do not fit in one line."""
    names, text = record
    # The range itself follows the text.
    names = names.replace(" range>", ">")
    if len(names) + 2 > width and " / " in names:
        names, opposite = names.split(" / ")
        yield f"{names} /", ""
        names = opposite
    yield names, text


# The first bytes of each format but WebP.
IMAGE_TYPES = {b"\xff\xd8": "jpeg", b"\x89PNG": "png", b"GIF8": "gif", b"BM": "bmp"}
AUDIO_TYPES = {b"RIFF": "wav", b"fLaC": "flac", b"OggS": "ogg"}
LoraOption = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Folder of a LoRA adapter to apply to the model."),
]
LoraModulesOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=FOLDER",
        help="LoRA adapter that requests can name as their model: NAME=FOLDER or JSON; repeatable.",
    ),
]

ImageOption = Annotated[
    list[Path] | None,
    typer.Option("--image", metavar="FILE", help="Image for a model that sees; repeatable."),
]


AudioOption = Annotated[
    list[Path] | None,
    typer.Option("--audio", metavar="FILE", help="Recording for a model that hears; repeatable."),
]


def media_files(paths: Sequence[Path] | None, option: str = "--image") -> tuple[bytes, ...]:
    """Read the files of images or recordings; raises typer.BadParameter.

    A file is not decoded here: the engine or the server does that, as with files of other clients.
    """
    found: list[bytes] = []
    for path in paths or ():
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            rule = f"{path} cannot be read: {reason}"
            raise typer.BadParameter(rule, param_hint=option) from None
        if len(data) > MAX_FILE_BYTES:
            rule = f"{path} has more than the {MAX_FILE_BYTES} bytes that a file may have"
            raise typer.BadParameter(rule, param_hint=option)
        found.append(data)
    return tuple(found)


def checked_images(paths: Sequence[Path] | None) -> Sequence[Path]:
    """Check that files of images can be read; raises typer.BadParameter.  Their contents are read later, one at a time."""
    for path in paths or ():
        media_files([path])
    return paths or ()


def image_url(data: bytes) -> str:
    """Return a file as a URL.  Its type comes from its first bytes, because some servers read only known types."""
    kind = next((kind for begin, kind in IMAGE_TYPES.items() if data.startswith(begin)), "webp")
    return f"data:image/{kind};base64,{b64encode(data).decode()}"


def audio_url(data: bytes) -> str:
    """Return a file as a URL, with the type that its first bytes show; MP3 has no fixed ones."""
    kind = next((kind for begin, kind in AUDIO_TYPES.items() if data.startswith(begin)), "mp3")
    return f"data:audio/{kind};base64,{b64encode(data).decode()}"


def integers(text: str) -> list[int]:
    """Parse integers separated by commas; raises typer.BadParameter."""
    try:
        return [int(part) for part in text.strip("[]").split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of integers such as 1,2,4") from None


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object; raises typer.BadParameter."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("not a JSON object")
    return cast("dict[str, Any]", value)


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON form of an adapter, as in vLLM."""

    name: str
    path: str
    base_model_name: str | None = None


def lora_modules(given: Sequence[str]) -> tuple[LoRARequest, ...]:
    """Parse adapters given as NAME=FOLDER, or as JSON with `name`, `path` and perhaps `base_model_name`.

    Raises:
        TrouperValidationError: an entry has neither form, or two adapters have the same name.
    """
    found: list[LoRARequest] = []
    for number, text in enumerate(given, 1):
        module = _module(text)
        if any(other.lora_name == module.name for other in found):
            raise invalid("lora_modules", "two adapters have the same name", module.name)
        found.append(LoRARequest(module.name, number, module.path, module.base_model_name))
    return tuple(found)


def chosen_adapter(folder: str | None, engine_args: EngineArgs) -> LoRARequest | None:
    """Return the adapter of a command, if it has one, and enable adapters in its engine.

    The adapter's name is the name of its folder.  A command uses one adapter, so its number is always 1.
    """
    if folder is None:
        return None
    engine_args.enable_lora = True
    return LoRARequest(Path(folder).resolve().name or "adapter", 1, folder)


def _module(text: str) -> _Module:
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text, type=_Module)
        except msgspec.MsgspecError as error:
            raise TrouperValidationError(
                f"lora_modules: {error}", parameter="lora_modules", value=text
            ) from None
    name, is_pair, path = text.partition("=")
    if not is_pair:
        raise invalid("lora_modules", "must be NAME=FOLDER or JSON", text)
    fields: dict[str, Any] = {"name": name, "path": path}
    return _Module(**fields)

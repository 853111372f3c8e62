"""Images at the terminal: the files of `--image`, and the conversation that keeps them."""

import pytest
import typer

from trouper.actors.rendering.media.files import MAX_FILE_BYTES
from trouper.errors import TrouperValidationError
from trouper.frontends.cli.chat.conversation import Conversation, load
from trouper.frontends.cli.values import audio_url, image_url, media_files

URL = "data:image/png;base64,iVBORw=="
PART = {"type": "image_url", "image_url": {"url": URL}}


def test_files_become_urls(tmp_path):
    begins = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF89a": "gif", b"BM": "bmp", b"x": "webp"}
    for begin, kind in begins.items():
        file = tmp_path / "a"
        file.write_bytes(begin)
        assert image_url(*media_files([file])).startswith(f"data:image/{kind};base64,")
    assert image_url(b"\x89PNG") == URL


@pytest.mark.parametrize("kind", ["missing", "folder", "large"])
def test_unusable_file_is_named(tmp_path, kind):
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    if kind == "large":
        with path.open("wb") as file:
            file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(typer.BadParameter, match=kind):
        media_files([path])


def test_first_question_has_the_images():
    conversation = Conversation("s", [URL])
    text = {"type": "text", "text": "what?"}
    assert conversation.messages("what?")[1]["content"] == [PART, text]
    # A failed answer leaves the conversation as it was.
    assert conversation.messages("what?")[1]["content"] == [PART, text]
    conversation.append("what?", "that", 9)
    _, first, _, second = conversation.messages("why?")
    assert (first["content"], second["content"]) == ([PART, text], "why?")


def test_saved_conversation_keeps_images():
    conversation = Conversation(None, [URL])
    conversation.append("what?", "that", 9)
    loaded, _ = load(conversation.dumped({}))
    assert loaded.messages() == conversation.messages()
    assert loaded.messages("why?")[-1]["content"] == "why?"


def test_recordings_are_kept_like_images():
    url = audio_url(b"RIFF")
    assert [audio_url(x).partition(";")[0][11:] for x in (b"fLaC", b"OggS", b"ID3")] == [
        "flac",
        "ogg",
        "mp3",
    ]
    conversation = Conversation(None, [url])
    (message,) = conversation.messages("what?")
    assert message["content"][0] == {
        "type": "input_audio",
        "input_audio": {"data": "UklGRg==", "format": "wav"},
    }
    conversation.append("what?", "that", 9)
    loaded, _ = load(conversation.dumped({}))
    assert loaded.messages() == conversation.messages()


def test_other_parts_are_not_loaded():
    data = b'[{"role": "user", "content": [{"type": "x"}]}, {"role": "assistant", "content": "a"}]'
    with pytest.raises(TrouperValidationError, match="image_url"):
        load(data)

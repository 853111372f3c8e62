"""Parts of messages that hold images: every form of the APIs, and what is refused by name."""

import pytest

from trouper.actors.rendering.media.parts import Base64File, FetchedFile, take_media
from trouper.errors import MediaError, TrouperValidationError, UnsupportedFeatureError

URL = "data:image/png;base64,QUJD"
PLACE = "messages[0].content[1]"


def chat(part, role="user"):
    return [{"role": role, "content": [{"type": "text", "text": "a"}, part]}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "image_url", "image_url": URL},
        {"image_url": {"url": URL}},
        {"image_url": URL},
        {"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None},
        {"type": "image_url", "image_url": {"url": memoryview(URL.encode())}},
        {"type": "image", "image": Base64File("QUJD")},
        {"type": "image", "image": b"ABC"},
        {"type": "image_pil", "image_pil": b"ABC"},
    ],
)
def test_each_form_holds_the_image(part):
    messages, (image,) = take_media(chat(part))
    assert messages[0]["content"] == [{"type": "text", "text": "a"}, {"type": "image", "index": 0}]
    assert (image.data, image.uuid, image.where) == (b"ABC", None, PLACE)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
        {"input_audio": {"data": memoryview(b"QUJD")}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,QUJD"}},
        {"audio_url": "data:;base64,QUJD"},
        {"type": "audio_url", "audio_url": FetchedFile(b"ABC")},
        {"type": "audio", "audio": b"ABC"},
    ],
)
def test_each_form_holds_the_recording(part):
    messages, (recording,) = take_media(chat(part))
    assert messages[0]["content"] == [{"type": "text", "text": "a"}, {"type": "audio", "index": 0}]
    assert (recording.data, recording.modality, recording.where) == (b"ABC", "audio", PLACE)


def test_images_keep_their_order():
    parts = [{"image_url": "data:;base64," + word} for word in ("QQ==", "Qg==")]
    _, images = take_media([*chat(parts[0]), *chat(parts[1], "tool")])
    assert [(i.data, i.where) for i in images] == [
        (b"A", PLACE),
        (b"B", "messages[1].content[1]"),
    ]


def test_texts_are_left_alone():
    messages = [
        {"role": "user", "content": "<image>"},
        {"role": "user", "content": [{"type": "text", "text": "image_url"}, "a"]},
        "nonsense",
        {"role": "user", "content": [{"type": ["image"]}, {"type": "unheard"}]},
    ]
    assert take_media(messages) == (messages, [])


def test_uuid_may_replace_the_image():
    _, (image,) = take_media(chat({"type": "image_url", "image_url": None, "uuid": "x"}))
    assert (image.data, image.uuid) == (None, "x")


@pytest.mark.parametrize("role", ["assistant", None, "x"])
def test_other_roles_have_no_images(role):
    with pytest.raises(TrouperValidationError, match=r"messages\[0\].content\[1\]: images"):
        take_media(chat({"image_url": URL}, role))


@pytest.mark.parametrize(
    ("part", "place", "code"),
    [
        ({"type": "image_url"}, "image_url", "invalid_value"),
        ({"type": "image_url", "image_url": 5}, "image_url", "invalid_value"),
        ({"type": "image_url", "image_url": {"url": ""}}, "image_url", "invalid_value"),
        ({"type": "image_url", "image_url": {"url": ["a"]}}, "image_url", "invalid_value"),
        ({"type": "image_url", "image_url": "http://a/b"}, "image_url", "media_url_blocked"),
        ({"type": "image_url", "image_url": "data:;base64,?"}, "image_url", "invalid_image"),
        (
            {"type": "image_url", "image_url": {"url": URL, "detail": 1}},
            "image_url.detail",
            "invalid_value",
        ),
        ({"type": "input_image", "file_id": "file-1"}, "file_id", "invalid_value"),
        ({"type": "image", "image": URL}, "image", "invalid_value"),
        ({"type": "image", "url": URL}, "image", "invalid_value"),
        ({"type": "image", "image": {"bytes": [1]}}, "image", "invalid_value"),
        ({"type": "image_pil", "image_pil": "/etc/passwd"}, "image_pil", "invalid_value"),
        ({"type": "image_url", "image_url": URL, "uuid": ""}, "uuid", "invalid_value"),
        ({"type": "input_audio"}, "input_audio", "invalid_value"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio.data", "invalid_value"),
        (
            {"type": "input_audio", "input_audio": {"data": "?"}},
            "input_audio.data",
            "invalid_audio",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "", "format": "aac"}},
            "input_audio.format",
            "invalid_value",
        ),
        ({"type": "audio_url", "audio_url": 5}, "audio_url", "invalid_value"),
        ({"type": "audio_url", "audio_url": "data:;base64,?"}, "audio_url", "invalid_audio"),
        ({"type": "audio_url", "audio_url": "http://a/b"}, "audio_url", "media_url_blocked"),
        ({"type": "audio", "audio": "a.wav"}, "audio", "invalid_value"),
        ({"type": "image_url", "image_url": URL, "uuid": "x" * 257}, "uuid", "invalid_value"),
    ],
)
def test_wrong_part_names_its_field(part, place, code):
    with pytest.raises(TrouperValidationError) as caught:
        take_media(chat(part))
    assert (caught.value.parameter, caught.value.code) == (f"{PLACE}.{place}", code)
    assert isinstance(caught.value, MediaError) == (code != "invalid_value")


def test_wrong_base64_names_its_part():
    with pytest.raises(MediaError, match="base64") as caught:
        take_media(chat({"type": "image", "image": Base64File("?")}))
    assert caught.value.parameter == PLACE


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"type": "audio_embeds", "audio_embeds": "AA=="}, "audio_embeds"),
        ({"type": "video_url", "video_url": {"url": URL}}, "video"),
        ({"type": "video", "video": []}, "video"),
        ({"type": "file", "file": {}}, "documents"),
        ({"type": "input_file", "file_id": "x"}, "documents"),
        ({"type": "image_embeds", "image_embeds": "AA=="}, "image_embeds"),
    ],
)
def test_other_media_are_refused_by_name(part, word):
    with pytest.raises(UnsupportedFeatureError, match=word) as caught:
        take_media(chat(part))
    assert caught.value.parameter == PLACE

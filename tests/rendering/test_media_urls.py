"""URLs of images: which are fetched, from which addresses, and what a hostile host or folder can do."""

import os
import shutil
import ssl
import subprocess
from contextlib import asynccontextmanager

import anyio
import pytest

from trouper.actors.rendering.media import downloads as module
from trouper.actors.rendering.media.downloads import Downloads
from trouper.actors.rendering.media.files import MAX_FILE_BYTES, RefusedFileError
from trouper.actors.rendering.media.parts import take_media
from trouper.actors.rendering.media.urls import admit, checked_addresses, read_local, redirected
from trouper.config.args import EngineArgs
from trouper.config.media import MediaConfig, MediaSources, media_sources
from trouper.errors import MediaError, TrouperUnprocessableEntityError, TrouperValidationError

SOURCES = MediaSources(("example.test", "*.example.test"))
DNS = {
    "example.test": ["93.184.215.14"],
    "six.example.test": ["2606:2800:21f:cb07:6820:80da:af6b:8b2c"],
    "rebind.example.test": ["93.184.215.14", "127.0.0.1"],
    "inside.example.test": ["10.0.0.8"],
    "meta.example.test": ["169.254.169.254"],
    "mapped.example.test": ["::ffff:127.0.0.1"],
    "compatible.example.test": ["::7f00:1"],
    "nat.example.test": ["64:ff9b::7f00:1"],
    "shared.example.test": ["100.64.0.1"],
    "zero.example.test": ["0.0.0.0"],
    "local.example.test": ["fd00::1"],
    "scope.example.test": ["fe80::1%eth0"],
    "loop.example.test": ["::1"],
    "bench.example.test": ["198.18.0.1"],
    "six4.example.test": ["2002:7f00:1::"],
    "teredo.example.test": ["2001:0:7f00:1::"],
    "group.example.test": ["224.0.0.1"],
}
PUBLIC = ("example.test", "six.example.test")
HOSTILE = [
    "http://example.test/", "https://example.test:22/", "https://example.test:80/", "https://other.test/",
    "https://example.test.evil.test/", "https://evilexample.test/", "https://example.test./",
    "https://127.0.0.1/", "https://2130706433/", "https://0x7f000001/", "https://0177.0.0.1/",
    "https://127.1/", "https://[::1]/", "https://[::ffff:7f00:1]/", "https://a@example.test/",
    "https://example.test@127.0.0.1/", "https://127.0.0.1\\@example.test/", "https://exam\tple.test/",
    "https://example.test\r\nHost: x/", "https:///a", "https://", "ftp://example.test/",
    "https://①②⑦.⓪.⓪.①/", "https://example.test:99999/", "https://example.test:a/", "https://" + "a" * 9000 + ".test/",
    "https://localhost/", "https://-a.example.test/", "https://ex_ample.test/", "https://a..example.test/",
    "https://[example.test/", "https://a.0x7f/", "https://example.test /",
]  # fmt: skip


def refusal(act, *args):
    with pytest.raises(RefusedFileError) as caught:
        act(*args)
    return caught.value.refusal.code


@pytest.mark.parametrize("url", HOSTILE)
def test_hostile_url_is_not_admitted(url):
    assert refusal(admit, url, SOURCES) in ("media_url_blocked", "invalid_value")


def test_allowed_hosts_are_admitted():
    found = admit("https://EXAMPLE.test/a%20b?c=d#e", SOURCES)
    assert found == ("https", "example.test", 443, "/a%20b?c=d")
    assert admit("https://a.b.example.test:443", SOURCES).path == "/"
    assert admit("https://any.test/", MediaSources(("*",))).host == "any.test"
    refusal(admit, "https://localhost/", MediaSources(("*",)))
    http = MediaSources(("localhost:8080",), allows_http=True)
    assert admit("http://localhost:8080/a", http).port == 8080
    refusal(admit, "http://localhost/a", http)


@pytest.mark.parametrize("host", DNS)
def test_only_public_addresses_are_connected_to(host):
    if host in PUBLIC:
        assert [str(a) for a in checked_addresses(DNS[host], SOURCES)] == DNS[host]
    else:
        assert refusal(checked_addresses, DNS[host], SOURCES) == "media_url_blocked"


def test_private_hosts_need_their_option():
    sources = MediaSources(allows_private=True)
    for address in ("127.0.0.1", "10.0.0.8", "fd00::1", "::1", "93.184.215.14"):
        assert checked_addresses([address], sources)
    for address in ("169.254.169.254", "fe80::1", "0.0.0.0", "::ffff:10.0.0.1", "224.0.0.1"):
        refusal(checked_addresses, [address], sources)


def test_redirects_stay_on_their_host():
    start = admit("https://example.test/a", SOURCES)
    assert redirected(start, "/b?c", SOURCES).path == "/b?c"
    assert redirected(start, "https://example.test/d", SOURCES).path == "/d"
    assert redirected(start, "../b", SOURCES) == start._replace(path="/b")
    for place in (
        "//other.test/", "https://six.example.test/", "http://example.test/", "https://[", "\t/b", "data:,", "/" + "b" * 9000,
    ):  # fmt: skip
        with pytest.raises(RefusedFileError, match="is redirected") as caught:
            redirected(start, place, SOURCES)
        assert caught.value.refusal.code == "media_url_blocked"


@pytest.mark.parametrize(
    "domains", ["example.org", ["https://a.org"], ["a.org/b"], [5], ["*a"], [""]]
)
def test_wrong_domain_is_refused_at_start(domains):
    with pytest.raises(TrouperValidationError, match="allowed_media_domains"):
        media_sources(EngineArgs(allowed_media_domains=domains))


def test_folder_must_exist_at_start(tmp_path):
    with pytest.raises(TrouperValidationError, match="allowed_local_media_path"):
        media_sources(EngineArgs(allowed_local_media_path=str(tmp_path / "no")))
    assert media_sources(EngineArgs(allowed_local_media_path=str(tmp_path))).folder


def test_file_below_the_folder_is_read(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b.png").write_bytes(b"ABC")
    url = f"file://{tmp_path}/in/a%20b.png"
    assert read_local(url, str(tmp_path)) == b"ABC"
    _, (image,) = take_media(chat(url), str(tmp_path))
    assert image.data == b"ABC"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("link.png", "media_url_blocked"), ("out/a.png", "media_url_blocked"),
        ("in/../../a.png", "media_url_blocked"), ("%2e%2e/a.png", "media_url_blocked"),
        ("in//a.png", "media_url_blocked"), ("a.png%00", "media_url_blocked"),
        ("none.png", "media_unavailable"), ("in", "media_unavailable"), ("pipe", "media_unavailable"),
        ("a.png/b", "media_url_blocked"), ("long.png", "media_too_large"), ("a.png?x", "invalid_value"),
    ],
)  # fmt: skip
def test_names_lead_nowhere_else(tmp_path, name, code):
    folder = tmp_path / "open"
    (folder / "in").mkdir(parents=True)
    for path in (tmp_path / "a.png", folder / "a.png"):
        path.write_bytes(b"ABC")
    (folder / "link.png").symlink_to(tmp_path / "a.png")
    (folder / "out").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    with open(folder / "long.png", "wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert refusal(read_local, f"file://{folder}/{name}", str(folder)) == code
    assert refusal(read_local, f"file://host{folder}/a.png", str(folder)) == "invalid_value"


def chat(*urls):
    return [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls],
        }
    ]


def answer(body=b"", status="200 OK", length=None, **fields):
    size = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {size}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return ["\r\n".join([*lines, "\r\n"]).encode() + body]


PATHS = {
    "/a.png": answer(b"ABC", Content_Type="text/html"),
    "/there": answer(status="302 Found", Location="/a.png"),
    "/out": answer(status="302 Found", Location="http://127.0.0.1/a.png"),
    "/circle": answer(status="302 Found", Location="/circle"),
    "/none": answer(b"secret of the host", status="404 Not Found"),
    "/gzip": answer(b"ABC", Content_Encoding="gzip"),
    "/long": answer(b"A", length=MAX_FILE_BYTES + 1),
    "/endless": [b"HTTP/1.1 200 OK\r\n\r\n", *[b"A" * 2**20] * 40],
    "/short": answer(b"A", length=5),
    "/nonsense": [b"ABC\r\n\r\n"],
    "/bytes": answer(b"ABC", Content_Length="1e9"),
    "/slow": answer(b"A", length=5),
    "/silent": [],
}
STAYS_OPEN = ("/slow", "/silent")


class Host:
    """A host that answers as PATHS say."""

    def __init__(self):
        self.heads = []
        self.is_asked = anyio.Event()

    async def serve(self, stream):
        async with stream:
            head = await stream.receive()
            while b"\r\n\r\n" not in head:
                head += await stream.receive()
            self.heads.append(head.decode())
            self.is_asked.set()
            path = self.heads[-1].split()[1]
            try:
                for piece in PATHS[path]:
                    await stream.send(piece)
                if path in STAYS_OPEN:
                    await stream.receive()
            except (anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError):
                pass


@asynccontextmanager
async def hosted(wrap=lambda listener: listener, *, private=True, scheme="http", trust=None):
    """Yield the host, its downloads and the beginning of its URLs."""
    host = Host()
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    sources = MediaSources(
        (f"images.test:{port}",), allows_http=scheme == "http", allows_private=private
    )
    config = MediaConfig(
        model_type="llava", folder="", row_token_id=1, placeholder_id=1, max_items=4, processor_cache_bytes=0,
        encoder_cache_bytes=0, processor_kwargs={}, sources=sources,
    )  # fmt: skip

    async def resolve(name, port):
        host.heads += [] if name == "images.test" else [name]
        return ["127.0.0.1"]

    async with wrap(listener) as served, anyio.create_task_group() as tasks:
        tasks.start_soon(served.serve, host.serve)
        yield host, Downloads(config, resolve, trust), f"{scheme}://images.test:{port}"
        tasks.cancel_scope.cancel()


async def fetched(downloads, *urls):
    prompt = await downloads.fill({"messages": chat(*urls)})
    _, images = take_media(prompt["messages"])
    return [image.data for image in images]


@pytest.mark.anyio
async def test_images_of_a_host_are_fetched():
    async with hosted() as (host, downloads, url):
        data = "data:;base64,QQ=="
        assert await fetched(downloads, url + "/a.png", data, url + "/there") == [
            b"ABC",
            b"A",
            b"ABC",
        ]
        head = host.heads[0].lower()
        assert f"host: {url[7:]}\r\n" in head
        assert "cookie" not in head
        assert "authorization" not in head


@pytest.mark.anyio
async def test_recordings_of_a_host_are_fetched():
    async with hosted() as (_, downloads, url):
        parts = [
            {"type": "audio_url", "audio_url": {"url": f"{url}/a.png"}},
            {"audio_url": f"{url}/a.png"},
        ]
        filled = await downloads.fill({"messages": [{"role": "user", "content": parts}]})
        _, found = take_media(filled["messages"])
        assert [(part.data, part.modality) for part in found] == [(b"ABC", "audio")] * 2


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/none", "status 404"), ("/gzip", "compressed"), ("/long", "longer"), ("/endless", "longer"),
        ("/short", "failed"), ("/nonsense", "failed"), ("/bytes", "longer|failed"), ("/circle", "redirects"),
    ],
)  # fmt: skip
async def test_bad_answer_is_unavailable_media(path, words):
    async with hosted() as (_, downloads, url):
        with pytest.raises(TrouperUnprocessableEntityError, match=words) as caught:
            await fetched(downloads, url + path)
    assert caught.value.parameter == "messages[0].content[0].image_url"
    assert "secret" not in str(caught.value)
    assert "127.0.0.1" not in str(caught.value)


@pytest.mark.anyio
async def test_redirect_to_another_host_is_blocked():
    async with hosted() as (host, downloads, url):
        with pytest.raises(MediaError, match="must contain a domain name") as caught:
            await fetched(downloads, url + "/out")
    assert caught.value.code == "media_url_blocked"
    assert len(host.heads) == 1


@pytest.mark.anyio
async def test_loopback_is_never_asked():
    async with hosted(private=False) as (host, downloads, url):
        with pytest.raises(MediaError, match="not public") as caught:
            await fetched(downloads, url + "/a.png")
    assert (caught.value.code, host.heads) == ("media_url_blocked", [])


@pytest.mark.anyio
async def test_host_is_resolved_once_for_a_request():
    """A second answer of the resolver is never used, so it cannot lead to another address."""
    answers = [["127.0.0.1"], ["169.254.169.254"]]
    async with hosted() as (_, downloads, url):

        async def resolve(name, port):
            return answers.pop(0)

        downloads._resolve = resolve
        assert await fetched(downloads, url + "/a.png") == [b"ABC"]
        assert len(answers) == 1
        with pytest.raises(MediaError, match="not public"):
            await fetched(downloads, url + "/a.png")


@pytest.mark.anyio
@pytest.mark.parametrize("path", STAYS_OPEN)
async def test_slow_host_is_given_up(path, monkeypatch):
    monkeypatch.setitem(module.FETCH_S, "image", 0.05)
    async with hosted() as (_, downloads, url):
        with pytest.raises(TrouperUnprocessableEntityError, match="within"):
            await fetched(downloads, url + path)


@pytest.mark.anyio
async def test_one_failure_ends_the_other_downloads():
    async with hosted() as (_, downloads, url):
        with pytest.raises(TrouperUnprocessableEntityError, match="404"):
            await fetched(downloads, url + "/silent", url + "/none")
        assert downloads._limiter.borrowed_tokens == 0


@pytest.mark.anyio
async def test_cancelled_request_closes_its_connection():
    async with hosted() as (host, downloads, url), anyio.create_task_group() as tasks:
        tasks.start_soon(fetched, downloads, url + "/silent")
        await host.is_asked.wait()
        tasks.cancel_scope.cancel()
    assert downloads._limiter.borrowed_tokens == 0


@pytest.mark.anyio
async def test_bytes_of_dropped_files_are_free_again(monkeypatch):
    monkeypatch.setattr(module, "OPEN_BYTES", 5)
    async with hosted() as (_, downloads, url):
        prompt = await downloads.fill({"messages": chat(url + "/a.png")})
        with pytest.raises(module.QueueOverflowError):
            await fetched(downloads, url + "/a.png")
        del prompt
        assert await fetched(downloads, url + "/a.png") == [b"ABC"]
        # Those that are still being read count, too.
        with pytest.raises(module.QueueOverflowError):
            await fetched(downloads, url + "/a.png", url + "/a.png")
        for path in ("/long", "/short"):
            with pytest.raises(TrouperUnprocessableEntityError):
                await fetched(downloads, url + path)
        assert await fetched(downloads, url + "/a.png") == [b"ABC"]


@pytest.mark.anyio
async def test_too_many_urls_are_not_fetched():
    async with hosted() as (host, downloads, url):
        with pytest.raises(MediaError, match="limit_mm_per_prompt"):
            await fetched(downloads, *[url + "/a.png"] * 5)
    assert host.heads == []


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    files = [str(folder / name) for name in ("public.pem", "key.pem")]
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
    ]
    names = ["-days", "2", "-subj", "/CN=images.test", "-addext", "subjectAltName=DNS:images.test"]
    subprocess.run(
        [*command, *names, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True
    )
    return files


def tls(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return lambda listener: anyio.streams.tls.TLSListener(
        listener, context, standard_compatible=False
    )


@pytest.mark.anyio
async def test_certificate_must_name_the_host(certificate):
    trust = ssl.create_default_context(cafile=certificate[0])
    async with hosted(tls(certificate), scheme="https", trust=trust) as (_, downloads, url):
        assert await fetched(downloads, url + "/a.png") == [b"ABC"]


@pytest.mark.anyio
async def test_unknown_certificate_is_refused(certificate):
    async with hosted(tls(certificate), scheme="https") as (host, downloads, url):
        with pytest.raises(TrouperUnprocessableEntityError, match="certificate"):
            await fetched(downloads, url + "/a.png")
    assert host.heads == []

"""Hostile images against a real server process: what it answers, how fast, with how much memory.

python -m tests.server.image_attack      # prints the table of docs/images.md
"""

import base64
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.support.image_payloads import HOSTILE, png, slow_jpeg
from tests.support.vision import VisionModel

from .process import started, stop

PATH, JSON = "/v1/chat/completions", [("content-type", "application/json")]
CANARY = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}


def largest():
    """Return the largest images that are accepted. They take seconds to pack."""
    return {
        "PNG of 5,792 x 5,792, the largest": (png(5792, 5792, rows=5792), None),
        "PNG of 5,792 x 5,792 in 16 bits with transparency": (
            png(5792, 5792, bits=16, color=6, rows=5792), None
        ),
    }  # fmt: skip


class ImageAttack:
    """Sends images to a server and compares each answer, and the texts that it writes besides."""

    def __init__(self, server):
        self._server = server
        self.num_wrong = 0
        self._said = self._canary()

    def row(self, name, data, code):
        """Send an image, and return what the server made of it as a line of the table."""
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        before = memory(self._server.pid, "VmRSS")
        Path(f"/proc/{self._server.pid}/clear_refs").write_text("5")
        begin = time.perf_counter()
        status, _, answer = self._server.request("POST", PATH, json.dumps(body).encode(), JSON)
        seconds = time.perf_counter() - begin
        error = json.loads(answer).get("error", {})
        growth = max(0, memory(self._server.pid, "VmHWM") - before) // 1024
        is_right = error.get("code") == code and self._canary() == self._said
        is_right &= "0x" not in error.get("message", "") and "PIL" not in error.get("message", "")
        self.num_wrong += not is_right
        size = len(data) // 1024 + 1
        return f"| {name} | {size:,} | {status} | {1000 * seconds:.0f} | {growth} | `{code or 'none'}` |"

    def _canary(self):
        """The text that the model always writes."""
        _, _, answer = self._server.request("POST", PATH, json.dumps(CANARY).encode(), JSON)
        return json.loads(answer)["choices"][0]["message"]["content"]


def memory(pid, name):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def attack_all(payloads, show=print):
    """Send payloads to a server with a tiny model, and return the number of wrong answers."""
    with tempfile.TemporaryDirectory() as folder:
        VisionModel("llava", Path(folder))
        with started("--model", folder) as server:
            attack = ImageAttack(server)
            # The process for images starts with the first one.
            attack.row("warm", *HOSTILE["nothing"])
            show("| file | KiB | status | ms | MiB more at the server's peak | code |")
            show("|---|---|---|---|---|---|")
            for name, (data, code) in payloads.items():
                show(attack.row(name, data, code))
            stop(server)
    return attack.num_wrong


def main():
    slow = {"JPEG that repeats a scan 2,000 times": (slow_jpeg(), "media_budget")}
    num_wrong = attack_all({**HOSTILE, **slow, **largest()})
    print(f"\n{num_wrong} answers were not as expected")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()

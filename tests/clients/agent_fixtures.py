"""Reduce an agent's requests to small anonymous fixtures: `python -m tests.clients.agent_fixtures AGENT VERSION < SESSION > FIXTURE`.

The session is the output of `agent_session`. Fields and types stay, long texts are cut, and ids and paths are replaced.
"""

import json
import re
import sys

MAX_TEXT = 100
MAX_TOOLS = 3  # of each type
IDS = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{24,}")
PATHS = re.compile(r"(?<![\w:/.])/(?:tmp|home|root|work)\b[\w./-]*")


def small(value):
    """Return a small value with the same fields and types."""
    if isinstance(value, str):
        text = PATHS.sub("/project", IDS.sub("0" * 32, value))
        return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
    if isinstance(value, list):
        return [small(each) for each in value]
    if isinstance(value, dict):
        return {key: small(each) for key, each in value.items()}
    return value


def bare(schema):
    """Return a schema of arguments without its descriptions."""
    if isinstance(schema, list):
        return [bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    texts = [key for key, each in schema.items() if key == "description" and isinstance(each, str)]
    return {key: bare(each) for key, each in schema.items() if key not in texts}


def some(tools):
    """Return a few tools of each type; their schemas are complete except for descriptions."""
    kept, kinds = [], []
    for tool in tools:
        kind = tool.get("type", "custom")
        kinds.append(kind)
        if kinds.count(kind) <= MAX_TOOLS:
            about = small({key: each for key, each in tool.items() if key == "description"})
            inner = {"tools": some(tool["tools"])} if "tools" in tool else {}
            kept.append({**bare(tool), **inner, **about})
    return kept


def fixture(agent, version, session):
    turns = []
    for asked in session["requests"]:
        if asked["body"] is not None:
            body = dict(asked["body"])
            tools = {"tools": some(body.pop("tools"))} if body.get("tools") else {}
            turns.append({"path": asked["path"], "body": {**small(body), **tools}})
    return {"agent": agent, "version": version, "turns": turns}


if __name__ == "__main__":
    found = fixture(*sys.argv[1:], json.load(sys.stdin))
    print(json.dumps(found, ensure_ascii=False, indent=1))

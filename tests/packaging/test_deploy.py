"""Every command line on the pages is valid, and the files for deployment agree with the code."""

import ast
import configparser
import json
import re
import shlex
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from trouper.config.parallel import CLUSTER_KEY
from trouper.frontends.server.asgi.routes import ROUTES
from trouper.frontends.server.shared.settings import ServeSettings

from .commands import command_lines, parse
from .test_metrics_page import tables

yaml = import_module("yaml")  # which huggingface_hub brings
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PUBLIC = {route.path for route in ROUTES if route.access == "public"}


def shell_blocks(page):
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S):
        if language in ("sh", "") and "trouper" in text:
            yield text


LINES = [
    (page, words)
    for page in PAGES
    for text in shell_blocks(page)
    for words in command_lines(text)
    if words and re.fullmatch(r"-?[a-z-]+", words[0])
]


@pytest.mark.parametrize(
    ("page", "words"),
    LINES,
    ids=[f"{page.stem}: {shlex.join(words)[:60]}" for page, words in LINES],
)
def test_the_parser_takes_each_command_of_the_pages(page, words, tmp_path, monkeypatch):
    if "models.toml" in words:
        monkeypatch.chdir(tmp_path)
        Path("models.toml").write_text('[chat]\nmodel = "Qwen/Qwen3-0.6B"\n')
    parse(words)


def test_the_pages_show_the_commands_that_there_are():
    assert len(LINES) > 30
    assert {"serve", "generate", "chat", "embed", "run-batch"} <= {words[0] for _, words in LINES}


def instructions():
    """Return the instructions of the Dockerfile as (name, arguments), with continued lines joined."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def test_dockerfile_runs_server_that_its_health_check_reaches():
    found = dict(instructions())
    names = {name for name, _ in instructions()}
    assert names <= {"FROM", "RUN", "COPY", "ENV", "VOLUME", "USER", "EXPOSE", "HEALTHCHECK",
                     "STOPSIGNAL", "ENTRYPOINT", "CMD"}  # fmt: skip
    assert json.loads(found["ENTRYPOINT"]) == ["trouper"]
    values = parse(json.loads(found["CMD"]))
    assert values["host"] == "0.0.0.0"  # what lies outside is the port that docker publishes
    assert values["port"] == int(found["EXPOSE"]) == ServeSettings().port
    path = re.search(r"http://127\.0\.0\.1:8000(/[\w/]+)", found["HEALTHCHECK"])[1]
    assert path in PUBLIC
    (extras,) = re.findall(r"/src\[([\w,]+)\]", (DEPLOY / "Dockerfile").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    for words in command_lines((DEPLOY / "Dockerfile").read_text().split("FROM")[0]):
        if words and words[0] == "serve":
            parse(words)


def test_unit_waits_longer_than_server_takes_to_end():
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read_string((DEPLOY / "trouper.service").read_text())
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/trouper")
    values = parse(words)
    assert values["model_name"] == "Qwen/Qwen3-0.6B"
    assert values["shutdown_timeout"] < int(service["TimeoutStopSec"])
    assert service["KillSignal"] == "SIGTERM"


def test_open_webui_asks_the_server_with_its_key():
    services = yaml.safe_load((DEPLOY / "open-webui.yaml").read_text())["services"]
    server, page = services["trouper"], services["open-webui"]
    values = parse(server["command"])
    assert page["environment"]["OPENAI_API_KEY"] in values["api_key"]
    assert page["environment"]["OPENAI_API_BASE_URL"] == f"http://trouper:{values['port']}/v1"
    build = server["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"


def dockerfile_environment():
    return dict(
        pair.split("=", 1)
        for name, text in instructions()
        if name == "ENV"
        for pair in text.split()
    )


def test_composed_server_ends_in_time_and_keeps_files():
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server = composed["services"]["trouper"]
    values = parse(shlex.split(server["command"]))
    assert values["data_parallel_size"] == 2
    assert values["shutdown_timeout"] < int(server["stop_grace_period"].removesuffix("s"))
    assert server["ports"] == [f"127.0.0.1:{values['port']}:{values['port']}"]
    assert set(server["environment"]) == {"TROUPER_API_KEY"}
    ((volume, folder),) = (text.split(":") for text in server["volumes"])
    assert volume in composed["volumes"]
    assert set(dockerfile_environment().values()) == {folder, f"{folder}/huggingface"}
    build = server["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"


def test_pod_probes_answered_routes_and_ends_gracefully():
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    claim, deployment, service = documents
    assert [d["kind"] for d in documents] == ["PersistentVolumeClaim", "Deployment", "Service"]
    template = deployment["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    values = parse(container["args"])
    assert values["host"] == "0.0.0.0"
    assert pod["terminationGracePeriodSeconds"] == values["shutdown_timeout"] + 10
    (port,) = container["ports"]
    assert port["containerPort"] == values["port"] == service["spec"]["ports"][0]["port"]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {port["name"]}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert set(paths.values()) <= PUBLIC
    assert paths["liveness"] == "/health/live"  # a worker that is started again needs no new pod
    assert paths["readiness"] == paths["startup"] == "/health/ready"
    (key,) = container["env"]
    assert key["name"] == "TROUPER_API_KEY"
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert mount["mountPath"] == dict(instructions())["VOLUME"]
    labels = deployment["spec"]["selector"]["matchLabels"]
    assert labels == template["metadata"]["labels"] == service["spec"]["selector"]
    assert pod["securityContext"]["runAsUser"] == int(
        re.search(r"--uid (\d+)", (DEPLOY / "Dockerfile").read_text())[1]
    )


def test_pods_of_set_are_machines_of_one_engine():
    documents = list(yaml.safe_load_all((DEPLOY / "leader-worker-set.yaml").read_text()))
    assert [d["kind"] for d in documents] == ["LeaderWorkerSet", "NetworkPolicy"]
    spec = documents[0]["spec"]["leaderWorkerTemplate"]
    pods = [spec["leaderTemplate"]["spec"], spec["workerTemplate"]["spec"]]
    known = {
        "$(POD_IP)": "10.0.0.1",
        "$(LWS_LEADER_ADDRESS)": "10.0.0.1",
        "$(LWS_WORKER_INDEX)": "1",
    }
    values = []
    for pod in pods:
        (container,) = pod["containers"]
        text = "\n".join(container["args"])
        for name, value in known.items():
            text = text.replace(name, value)
        assert "$" not in text
        values.append(parse(text.split("\n")))
        variables = {entry["name"]: entry["valueFrom"] for entry in container["env"]}
        assert variables[CLUSTER_KEY] == {"secretKeyRef": {"name": "trouper-cluster", "key": "key"}}
    front, host = values
    assert (front["node_rank"], host["node_rank"]) == (0, 1)
    for name in ("nnodes", "master_addr", "master_port", "pipeline_parallel_size", "model_name"):
        assert front[name] == host[name]
    assert front["nnodes"] == spec["size"] == 2
    assert front["host"] == "0.0.0.0"
    leader = pods[0]
    assert leader["terminationGracePeriodSeconds"] == front["shutdown_timeout"] + 10
    (container,) = leader["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": front["port"], "cluster": front["master_port"]}
    paths = {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness")}
    assert paths == {"/health/ready"} <= PUBLIC
    (_, open_to_all) = documents[1]["spec"]["ingress"]
    assert open_to_all == {"ports": [{"port": front["port"]}]}  # clients reach no other


def test_python_examples_use_existing_port_and_routes():
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "deploy.md").read_text(), re.M | re.S
    )
    assert len(blocks) == 2
    for block in blocks:
        ast.parse(block)
        assert f'base_url="http://127.0.0.1:{ServeSettings().port}/v1"' in block
    assert {"/v1/chat/completions", "/v1/embeddings"} <= {route.path for route in ROUTES}


def test_prometheus_scrapes_the_port_that_serves():
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{ServeSettings().port}"]}]
    assert "/metrics" in PUBLIC  # prometheus's default path


def test_the_dashboard_asks_for_metrics_that_there_are():
    board = json.loads((DEPLOY / "grafana.json").read_text())
    known = set()
    for name, kind in re.findall(r"\| `(trouper:\w+)` \| (\w+)", "".join(tables())):
        known |= {
            name,
            *(f"{name}_{part}" for part in ("bucket", "sum", "count") if kind == "histogram"),
        }
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"trouper:\w+", query)}
    assert len(asked) > 15
    assert asked <= known
    for query in queries:
        assert query.count("(") == query.count(")")
    for panel in board["panels"]:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
    places = [tuple(panel["gridPos"][axis] for axis in "xy") for panel in board["panels"]]
    assert len(set(places)) == len(places)

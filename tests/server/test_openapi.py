"""The document says what is served, and what is served keeps to the document."""

import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from jsonschema_rs import Draft202012Validator

from trouper.frontends.server.asgi.app import App
from trouper.frontends.server.asgi.routes import ROUTES
from trouper.frontends.server.ops.openapi import document
from trouper.frontends.server.ops.operations import is_below_ui

from .client import Client
from .process import started

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from schemathesis import openapi
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
HEADERS = {"x-request-timeout-ms": "500"}


@pytest.mark.anyio
async def test_a_listener_describes_the_routes_it_has(app, client):
    public = (await client.get("/openapi.json")).json
    without_page = {r.path for r in ROUTES if not is_below_ui(r.path)}
    assert set(public["paths"]) == without_page & {r.path for r in ROUTES if r.access != "admin"}
    assert public["security"] == []
    admin = (await Client(App(app.service, is_admin_listener=True)).get("/openapi.json")).json
    assert set(admin["paths"]) == without_page


@pytest.mark.anyio
async def test_what_needs_a_key_says_so(make_client):
    client = make_client(api_keys=("sesame",))
    answer = await client.get("/openapi.json", [("authorization", "Bearer sesame")])
    assert answer.json["security"] == [{"key": []}]
    assert answer.json["paths"]["/health"]["get"]["security"] == []
    assert "security" not in answer.json["paths"]["/v1/models"]["get"]


def test_request_of_readme_is_valid_by_document():
    components = document(ROUTES, has_keys=False)["components"]
    schema = {"$ref": "#/components/schemas/ChatRequest", "components": components}
    validator = Draft202012Validator(schema)
    assert validator.is_valid({"messages": [{"role": "user", "content": "Hello"}], "n": None})
    assert not validator.is_valid({"messages": "Hello"})
    assert not validator.is_valid({})


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.filterwarnings("ignore")  # schemathesis's own
def test_whatever_document_allows_gets_answer_that_it_describes():
    num_cases = 0
    with started() as server:
        schema = openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
        # The stream of states has no end.
        for found in schema.exclude(path="/ui/state").get_all_operations():
            strategy = found.ok().as_strategy()

            @settings(
                max_examples=15,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=strategy)
            def ask(case):
                nonlocal num_cases
                num_cases += 1
                answer = case.call(headers=HEADERS)
                assert answer.status_code != 500, case.as_curl_command()
                case.validate_response(answer, checks=CHECKS)

            ask()
        assert server.request("GET", "/health/ready")[0] == 200
    print(f"{num_cases} requests")

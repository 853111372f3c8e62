"""OpenAI's API by Ray Serve (`pip install 'ray[serve]'`): `serve run ray_serve:app`, in the folder of this file.

Each of Ray Serve's replicas opens an engine of its own. Its workers run inside the replica's machine; to have them elsewhere, too, add
`distributed_executor_backend="ray"` and stages.
"""

from ray import serve

from trouper import AsyncLLMEngine, EngineArgs
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.shared.settings import ServerSettings


class Model:
    """ASGI application that opens its engine when it is started, and closes it when it ends."""

    def __init__(self, **options):
        self._options = options
        self._app = None

    async def __call__(self, scope, receive, send):
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        async with AsyncLLMEngine(EngineArgs(**self._options)) as engine:
            self._app = create_app(engine, ServerSettings(served_model_names=("my-model",)))
            await self._app(scope, receive, send)


@serve.deployment(num_replicas=2, max_ongoing_requests=256, ray_actor_options={"num_cpus": 8})
@serve.ingress(Model(model="Qwen/Qwen3-0.6B", device_worker="process", max_model_len=8192))
class Server:
    """Deployment whose requests all go to the application."""


app = Server.bind()

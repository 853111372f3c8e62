"""Errors of Ray are losses or refused starts, and none of its calls holds up the event loop."""

import sys
import threading
from types import SimpleNamespace

import pytest

from trouper.actors.executor.workers.machines import launch_ray
from trouper.actors.executor.workers.machines.launch_ray import open_ray
from trouper.config.args import EngineArgs
from trouper.config.parallel import NodesConfig
from trouper.config.resolve import resolve
from trouper.errors import DeviceStartError

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["trio"])
def anyio_backend(request):
    return request.param


class RayError(Exception):
    """As `ray.exceptions` has it."""


class PlayedRay:
    """Ray whose calls of some names fail; it notes each call, and whether the event loop's thread made it."""

    def __init__(self, fails):
        self.fails, self.calls, self.loop = fails, [], threading.current_thread()
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: "127.0.0.1",
            placement_group=lambda bundles, strategy: self._call("placement_group", self),
            remove_placement_group=lambda places: self._call("remove_placement_group"),
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=self._nothing),
        )

    def _nothing(self, *args, **options):
        return None

    def _call(self, name, answer=None):
        self.calls.append(name)
        assert threading.current_thread() is not self.loop, f"{name} holds up the loop"
        if name in self.fails:
            raise RayError(name)
        return answer

    def is_initialized(self):
        return False

    def init(self, **options):
        self._call("init")

    def shutdown(self):
        self._call("shutdown")

    def wait(self, timeout_s):
        return self._call("wait", "available_resources" not in self.fails)

    def available_resources(self):
        return self._call("available_resources", {})

    def remote(self, *args, **options):
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._actor))

    def _actor(self, *args):
        method = SimpleNamespace(remote=lambda *args: self._call("method"))
        return self._call("actor", SimpleNamespace(listen=method))

    def get(self, reference, timeout):
        return self._call("get")

    def kill(self, actor):
        self._call("kill")


def a_ray(monkeypatch, fails):
    ray = PlayedRay(fails)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", None)
    monkeypatch.setattr(launch_ray, "import_module", lambda name: sys.modules[name])
    return ray


@pytest.mark.parametrize(
    "fails", ["placement_group", "wait", "available_resources", "actor", "method", "get"]
)
async def test_error_of_ray_is_start_that_has_failed(fails, monkeypatch):
    monkeypatch.setattr(launch_ray, "RESERVE_S", 0.01)
    ray = a_ray(monkeypatch, {fails})
    async with open_ray(resolve(EngineArgs()), NodesConfig("ray")) as launcher_of:
        worker_group = launcher_of(0)
        with pytest.raises(DeviceStartError, match="Ray"):
            await worker_group()
        # at once: another replica, or another user of the cluster, may have room for it
        assert ("remove_placement_group" in ray.calls) == (fails != "placement_group")
        assert ray.calls.count("actor") - (fails == "actor") == ray.calls.count("kill")
    assert ray.calls[-1] == "shutdown"
    assert ray.calls.count("remove_placement_group") == (fails != "placement_group")


@pytest.mark.parametrize("fails", ["kill", "remove_placement_group"])
async def test_what_ray_has_lost_need_not_be_given_back(fails, monkeypatch):
    ray = a_ray(monkeypatch, {fails, "get"})
    async with open_ray(resolve(EngineArgs()), NodesConfig("ray")) as launcher_of:
        worker_group = launcher_of(0)
        for _ in range(2):
            with pytest.raises(DeviceStartError, match="Ray"):
                await worker_group()
    assert ray.calls.count("kill") == ray.calls.count("remove_placement_group") == 2
    assert ray.calls[-1] == "shutdown"


async def test_address_that_cannot_be_bound_leaves_cluster(monkeypatch):
    ray = a_ray(monkeypatch, set())

    def serve_at(address, backlog):
        raise OSError("no such address")

    monkeypatch.setattr(launch_ray, "serve_at", serve_at)
    with pytest.raises(DeviceStartError, match=r"cannot listen at 127\.0\.0\.1: no such address"):
        async with open_ray(resolve(EngineArgs()), NodesConfig("ray")):
            pass
    assert ray.calls == ["init", "shutdown"]

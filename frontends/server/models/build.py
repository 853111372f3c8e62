"""Build the services, the table and the residency of a server with several models from their plans."""

from collections.abc import Callable, Sequence

import anyio.to_thread
import msgspec

from trouper.config.args import EngineArgs
from trouper.frontends.server.models.options import ModelOptions, found_models, read_limits
from trouper.frontends.server.models.policy import COLD, FAILED
from trouper.frontends.server.models.residency import Residency
from trouper.frontends.server.models.sizes import ModelPlan, plan_models
from trouper.frontends.server.models.table import HostedModel, ModelTable
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.settings import ServeSettings


def build_residency(
    plans: Sequence[ModelPlan],
    settings: ServeSettings,
    budget: int,
    report: Callable[[str], None],
) -> Residency:
    """Create a service for each model, and the residency that owns their engines.

    The first service is the front, which holds the state shared by all models: the response store, admission and background tasks.
    """
    models: list[HostedModel] = []
    for plan in plans:
        front = models[0].service if models else None
        models.append(_served(plan, settings, front))
    table = ModelTable(models, settings.default_model, budget)
    residency = Residency(table, read_limits(settings, budget), report)
    residency.loads_by_request = settings.autoload
    models[0].service.models = residency
    return residency


def _served(plan: ModelPlan, settings: ServeSettings, front: Service | None) -> HostedModel:
    options = plan.options
    own = msgspec.structs.replace(
        settings,
        served_model_names=(options.name, *options.aliases),
        lora_modules=options.adapters,
    )
    service = Service(own, front=front, plan=plan.config)
    if plan.config is not None:
        service.set_limits(plan.config)
    return HostedModel(plan, service)


class FolderReader:
    """Rescan `--models-dir` when an administrator requests it."""

    def __init__(
        self, residency: Residency, settings: ServeSettings, find: Callable[[], list[ModelOptions]]
    ) -> None:
        self._residency = residency
        self._settings = settings
        self._find = find

    async def __call__(self) -> tuple[list[str], list[str]]:
        """Add new models, and remove models without files.  Returns the names of the added and of the removed ones.

        A loaded model without files stays until it is unloaded.
        """
        table, budget = self._residency.table, self._residency.limits.budget

        def read() -> tuple[set[str], list[ModelPlan]]:
            options = self._find()
            new = [each for each in options if each.name not in table.models]
            return {each.name for each in options}, plan_models(new, budget)

        names, plans = await anyio.to_thread.run_sync(read)
        front = table.default.service.front
        for plan in plans:
            table.models.setdefault(plan.options.name, _served(plan, self._settings, front))
        removed: list[str] = []
        for model in list(table):
            is_gone = model.options.is_found and model.name not in names
            is_idle = model.record.state in (COLD, FAILED) and not model.record.has_work
            if is_gone and is_idle and model.moves_to is None and model.service is not front:
                del table.models[model.name]
                front.services.remove(model.service)
                removed.append(model.name)
        self._residency.note_table()
        return [plan.options.name for plan in plans], removed


def folder_reader(
    residency: Residency,
    settings: ServeSettings,
    base: EngineArgs,
    given: frozenset[str],
    tables: dict[str, dict[str, object]],
) -> FolderReader:
    """Return the reader of `--models-dir`."""
    return FolderReader(residency, settings, lambda: found_models(settings, base, given, tables))

"""Facts of a place that its workers go by instead of the front's: paths of the same files, and how many share the cores."""

from typing import Self

import msgspec

from trouper.config.pooler import PoolerSpec
from trouper.config.resolve import EngineConfig


class PlaceFacts(msgspec.Struct, frozen=True):
    """Facts that a worker takes from the place where it runs, and not from the front's plan."""

    num_workers: int  # that share the machine's cores
    model: str | None = None  # None: the path is the front's
    tokenizer: str | None = None
    code_path: str | None = None
    draft_model: str | None = None
    dense: tuple[str, ...] = ()  # folders of the modules that a model which pools ends in

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Take the paths that this machine has resolved itself."""
        draft = config.draft_model
        return cls(
            config.num_workers,
            config.model.path,
            config.tokenizer,
            config.code_path,
            None if draft is None else draft.path,
            _dense_folders(config.pooler),
        )

    def localise(self, config: EngineConfig) -> EngineConfig:
        """Return the front's plan with the paths of this place."""
        replace = msgspec.structs.replace
        found = replace(config, num_workers_here=self.num_workers)
        if self.model is None:
            return found
        draft = config.draft_model
        if draft is not None and self.draft_model is not None:
            draft = replace(draft, path=self.draft_model)
        return replace(
            found,
            model=replace(config.model, path=self.model),
            tokenizer=self.tokenizer,
            code_path=self.code_path,
            draft_model=draft,
            pooler=self._localise_pooler(config.pooler),
        )

    def _localise_pooler(self, pooler: PoolerSpec | None) -> PoolerSpec | None:
        if pooler is None or len(pooler.dense) != len(self.dense):  # none, or another model's
            return pooler
        pairs = zip(pooler.dense, self.dense, strict=True)
        dense = tuple(msgspec.structs.replace(each, folder=folder) for each, folder in pairs)
        return msgspec.structs.replace(pooler, dense=dense)

    def as_argument(self) -> bytes:
        """Encode it for a worker's command line."""
        return msgspec.json.encode(self)

    @classmethod
    def of_argument(cls, text: str) -> Self:
        """Decode it again."""
        return msgspec.json.decode(text, type=cls)


def _dense_folders(pooler: PoolerSpec | None) -> tuple[str, ...]:
    return () if pooler is None else tuple(each.folder for each in pooler.dense)

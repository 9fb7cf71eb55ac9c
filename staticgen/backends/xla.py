"""Backend ``xla``: XLA through torch-xla, for TPUs; what it compiles it replays, and nothing is traced again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from staticgen.backends.hlo import HloBackend
from staticgen.device_functions import Draft
from staticgen.engines import Executable, NullEngine

if TYPE_CHECKING:
    from staticgen.step import Step


class XlaBackend(HloBackend):
    """``device`` is ``tpu`` or ``cpu``, or ``null`` for tests; there are no options."""

    name = "xla"

    def __init__(self, device: str | None = None, options: Mapping[str, str] | None = None):
        super().__init__(device, options, NullEngine())
        self.emulated = True

    def _take_weights(self, step: Step) -> None:
        return None

    def _make(self, draft: Draft) -> Executable:
        assert isinstance(self.engine, NullEngine)
        return self.engine.take(draft)

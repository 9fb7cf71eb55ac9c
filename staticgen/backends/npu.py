"""Backend ``npu``: OpenVINO's NPU plugin.

On a machine without an NPU the plugin's partitioner runs on another device when ``NPUW_DEVICES`` names
one, as an option or in the environment: the same code path, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from staticgen.backends.openvino import OpenVINOBackend
from staticgen.errors import UnknownNameError

# One partition, as on an NPU without the partitioner: cut into several, the stand-in gave wrong logits for
# two-layer models (OpenVINO 2026.4.1). No 16-bit values between partitions.
_STAND_IN_OPTIONS = {"NPU_USE_NPUW": "YES", "NPUW_ONLINE_PIPELINE": "NONE", "NPUW_F16IC": "NO"}


class NPUBackend(OpenVINOBackend):
    """``device`` is NPU; ``options`` are the NPU plugin's properties, ``NPUW_DEVICES`` among them."""

    name = "npu"
    default_device = "NPU"

    def __init__(self, device: str | None = None, options: Mapping[str, str] | None = None):
        options = dict(options or {})
        if device is not None and device.upper().split(".")[0] != "NPU":
            raise UnknownNameError(
                f"backend 'npu' runs on device NPU only, got device={device!r}; backend='openvino' takes others"
            )
        stand_in = str(options.get("NPUW_DEVICES") or os.environ.get("NPUW_DEVICES") or "").upper()
        if stand_in:
            options = {**_STAND_IN_OPTIONS, **options, "NPUW_DEVICES": stand_in}
            self.emulated = "NPU" not in stand_in
            self._stand_in = stand_in.split(",")[0]
        super().__init__(device, options)

    @property
    def description(self) -> str:
        if self.emulated:
            return f"{self.name} plugin run on {self._options['NPUW_DEVICES']}"
        return f"{super().description}, which computes in float16"

    def _require_devices(self) -> None:
        if not self.emulated:
            super()._require_devices()

"""Ahead of time, on a machine without the target: bundles, and the step as files for other compilers."""

from .bundles import compile_bundle
from .compress import WEIGHT_MODES, compress_weights
from .npu import PLATFORMS, NPUBlob, compile_blob, find_compiler
from .tpu import TPUAccount, account, account_all

__all__ = [
    "PLATFORMS", "WEIGHT_MODES", "NPUBlob", "TPUAccount", "account", "account_all", "compile_blob", "compile_bundle", "compress_weights", "find_compiler",
]  # fmt: skip

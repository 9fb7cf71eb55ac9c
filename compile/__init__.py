"""Ahead of time, on a machine without the target: the step of a model, written to files for a compiler.

So far it writes OpenVINO IR with every dimension fixed, for Intel's NPU compiler or any other tool that reads it.
"""

from .compress import WEIGHT_MODES, compress_weights
from .ir import export_ir
from .npu import PLATFORMS, NPUBlob, compile_blob, find_compiler

__all__ = ["PLATFORMS", "WEIGHT_MODES", "NPUBlob", "compile_blob", "compress_weights", "export_ir", "find_compiler"]

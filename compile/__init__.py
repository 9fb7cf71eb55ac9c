"""Ahead of time, on a machine without the target: the step of a model, written to files for a compiler.

So far it writes OpenVINO IR with every dimension fixed, for Intel's NPU compiler or any other tool that reads it.
"""

from .ir import export_ir

__all__ = ["export_ir"]

"""Ahead of time, on a machine without the target: bundles, and the step as files for other compilers."""

from .bundles import compile_bundle
from .ir import export_ir

__all__ = ["compile_bundle", "export_ir"]

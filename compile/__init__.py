"""Ahead of time, on a machine without the target: bundles, and the step as files for other compilers."""

from .bundles import STAGES, compile_bundle
from .ir import export_ir

__all__ = ["STAGES", "compile_bundle", "export_ir"]

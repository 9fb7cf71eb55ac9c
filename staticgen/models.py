"""What the package takes for a model: a transformers model, a compiled one, or the folder of a bundle.

The classes of transformers' models are imported for a transformers model only.
"""

from __future__ import annotations

import os
from typing import Any

from staticgen.compiled import CompiledModel, open_compiled


def read_model(model: Any) -> Any:
    """The model itself; of a path, the compiled model of the bundle there.

    Raises:
        TypeError, UnsupportedModelError, ValueError: it is none that can be used; see :class:`staticgen.step.Step`.
        FileNotFoundError, BundleError: see :func:`staticgen.compiled.open_compiled`.
    """
    if isinstance(model, str | os.PathLike):
        return open_compiled(model)
    if not isinstance(model, CompiledModel):
        from staticgen.step import check_model  # noqa: PLC0415

        check_model(model)
    return model


def vocab_size(model: Any) -> int:
    """V, the number of token ids that the model can embed."""
    if isinstance(model, CompiledModel):
        return model.step.vocab_size
    from staticgen.step import vocab_size as read_vocab_size  # noqa: PLC0415

    return read_vocab_size(model)


def position_limit(model: Any) -> int | None:
    """How many positions the model can number, or None where there is no hard limit."""
    if isinstance(model, CompiledModel):
        return model.step.position_limit
    from staticgen.step import position_limit as read_position_limit  # noqa: PLC0415

    return read_position_limit(model)


def longest(model: Any, most: int) -> int:
    """``most`` tokens, or as many as the model has positions for, or was compiled for; the last token needs none."""
    if isinstance(model, CompiledModel):
        return model.max_length
    limit = position_limit(model)
    return most if limit is None else min(most, limit + 1)

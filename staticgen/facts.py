"""What the runtime knows of a step besides how to run it; read off a model, or off files of a compiled one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from staticgen.identity import Identity
from staticgen.rotary import Rotation
from staticgen.shapes import CacheSpec, StepForm


class StepFacts(ABC):
    """One step, described.

    Attributes:
        form: how its attention is written.
        cache_spec: what every layer caches.
        vocab_size: V, the number of token ids that the model can embed.
        logits_size: numbers per row of logits; V, or more where the head is wider than the vocabulary.
        position_limit: how many positions the model has, None where nothing limits them.
    """

    form: StepForm
    cache_spec: CacheSpec
    vocab_size: int
    logits_size: int
    position_limit: int | None

    @property
    @abstractmethod
    def config(self) -> Any:
        """The model's config, of transformers."""

    @abstractmethod
    def identity(self) -> Identity:
        """Which model this is; read once, with all its weights."""

    @abstractmethod
    def rotations(self) -> list[Rotation | None]:
        """How the keys of each caching layer turn with their position; None for a layer where they do not.

        Raises:
            UnsupportedModelError: they change in another way than by a rotary embedding.
        """

    @property
    def layers(self) -> int:
        """N, the number of layers with keys and values."""
        return len(self.cache_spec.layers)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values; logits are float32 always."""
        return self.cache_spec.dtype

    @property
    def model_type(self) -> str:
        """What transformers calls the kind of model."""
        return self.config.model_type

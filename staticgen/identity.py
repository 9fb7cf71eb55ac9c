"""Which model keys and values belong to: what can be compared across processes and machines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from staticgen.shapes import CacheSpec, LayerSpec

_SAMPLES = 512  # words of each tensor that are digested in their order; of the others only the sum
# Of a config: what changes no logit and is set by saving, say.
_IDLE_FIELDS = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Identity:
    """A model, as far as its keys and values depend on it.

    Attributes:
        spec: what it caches, and in which dtype.
        config: its config's fields that compute, as JSON has them.
        weights: a digest of every tensor's name, shape, dtype and numbers.
    """

    spec: CacheSpec
    config: Mapping[str, Any]
    weights: str

    def to_strings(self) -> dict[str, str]:
        """The same as metadata of a file."""
        return {
            "dtype": str(self.spec.dtype).removeprefix("torch."),
            "layers": json.dumps([asdict(layer) for layer in self.spec.layers]),
            "config": json.dumps(self.config, sort_keys=True),
            "weights": self.weights,
        }

    @classmethod
    def from_strings(cls, strings: Mapping[str, str]) -> Identity:
        """The inverse of :meth:`to_strings`.

        Raises:
            ValueError, TypeError, KeyError: they are none of ours.
        """
        layers, config = json.loads(strings["layers"]), json.loads(strings["config"])
        if not isinstance(layers, list) or not layers or not isinstance(config, dict):
            raise TypeError("'layers' must be a list of at least one, and 'config' an object")
        dtype = _DTYPES.get(strings["dtype"])
        if dtype is None:
            raise ValueError(f"dtype is {strings['dtype']!r}, expected one of {', '.join(_DTYPES)}")
        return cls(CacheSpec(tuple(_layer(layer) for layer in layers), dtype), config, strings["weights"])


def identity_of(model: nn.Module, config: Any, spec: CacheSpec) -> Identity:
    """The identity of a transformers model that caches ``spec``; all its weights are read."""
    fields = json.loads(json.dumps(computing_fields(config.to_dict()), sort_keys=True, default=repr))
    return Identity(spec, fields, _digest(model))


def computing_fields(config: Any) -> Any:
    """A config as nested dicts, without what changes no logit and is set by saving, say."""
    if not isinstance(config, dict):
        return config
    return {name: computing_fields(value) for name, value in config.items() if name not in _IDLE_FIELDS}


def difference(found: Identity, expected: Identity) -> str | None:
    """The first thing in which two models differ, with both values; None when they are one."""
    if found is not expected:
        for name, value, other in _fields(found, expected):
            if value != other:
                return f"{name} {value}, not {other}"
    return None


def _fields(one: Identity, other: Identity) -> Iterator[tuple[str, object, object]]:
    """The name of every field, and its value in both; what says most comes first."""
    yield "config.model_type", one.config.get("model_type"), other.config.get("model_type")
    yield "dtype", one.spec.dtype, other.spec.dtype
    yield "a number of layers of", len(one.spec.layers), len(other.spec.layers)
    for index, (layer, its) in enumerate(zip(one.spec.layers, other.spec.layers, strict=False)):
        yield f"layer {index}", layer, its
    for name in sorted({*one.config, *other.config}):
        yield f"config.{name}", one.config.get(name), other.config.get(name)
    yield "weights with digest", one.weights, other.weights


def _digest(model: nn.Module) -> str:
    """Of all numbers, in a tenth of a second for each gigabyte: a sum of their bits, and some of them in order."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        if octets.storage_offset() % 8:
            octets = octets.clone()
        whole = len(octets) // 8 * 8
        words = octets[:whole].view(torch.int64)
        digest.update(str(int(words.sum())).encode())
        digest.update(words[:: max(1, len(words) // _SAMPLES)].contiguous().numpy().tobytes())
        digest.update(octets[whole:].numpy().tobytes())
    return digest.hexdigest()


def _layer(fields: Any) -> LayerSpec:
    layer = LayerSpec(**fields)
    sizes = [layer.heads, layer.key_dim, layer.value_dim, *([] if layer.window is None else [layer.window])]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"layer sizes {fields!r} must be whole numbers above 0")
    return layer

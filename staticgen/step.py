"""The step: one forward pass of a transformers model at a fixed size.

    step(token_ids [B, T], position_ids [B, T], first_positions [B, T], slot_positions, past keys, past values)
        -> logits [B, V] of the last token, new keys, new values

Prefill, a chunk of a long prompt and decode are this one function at different sizes. It returns only
the new keys and values; whoever runs it writes them to the cache.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from staticgen.attention import ATTENTION_NAME, Past, StepCache, register_attention
from staticgen.cache import KVBuffers, empty_slots
from staticgen.errors import UnsupportedModelError
from staticgen.facts import StepFacts
from staticgen.identity import Identity, computing_fields, identity_of
from staticgen.legacy import adapt_legacy_attention
from staticgen.rotary import Rotation, find_rotation
from staticgen.shapes import EMPTY, CacheSpec, LayerSpec, StepForm, StepShape

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Rotary embeddings whose frequencies change with the length of the text; a compiled step holds the
# frequencies that apply up to the trained length.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_PROBE_TOKENS = 8
_SAMPLES = 64  # numbers of each tensor that a stamp looks at


class Step(nn.Module, StepFacts):
    """A model, ready to run as a static step. The model given stays untouched and shares its weights.

    Args:
        model: a causal decoder of transformers, on the CPU, in float32, bfloat16 or float16.
        form: how the target wants attention written.

    Attributes:
        stamp: :func:`model_stamp` of the model when the step was made.

    Raises:
        TypeError: ``model`` is no ``PreTrainedModel``.
        UnsupportedModelError: it is not a causal decoder, or it has layers that cannot be a static step.
    """

    def __init__(self, model: PreTrainedModel, form: StepForm):
        super().__init__()
        check_model(model)
        register_attention()
        self.form = form
        self.stamp = model_stamp(model)
        self.logits_size = 0
        self._caching: list[int] = []  # layers with keys and values of their own, by their index in the model
        self.model = _clone_sharing_weights(model)
        legacy = adapt_legacy_attention(self.model)
        if legacy is None:
            self.model.set_attn_implementation(ATTENTION_NAME)
        else:  # it takes no implementation, but makes a mask for the one that it has, which nobody would read
            self.model.config._attn_implementation_internal = ATTENTION_NAME
        self._legacy_arguments = legacy or {}
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._last_logits_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._takes_positions = "position_ids" in parameters  # not where ALiBi is all that tells positions
        self.vocab_size = vocab_size(model)
        self.position_limit = None
        self._identity: Identity | None = None
        self._found_rotations: list[Rotation | None] | None = None
        self.cache_spec = self._probe(model)

    @property
    def config(self) -> Any:
        return self.model.config

    def identity(self) -> Identity:
        if self._identity is None:
            self._identity = identity_of(self.model, self.config, self.cache_spec)
        return self._identity

    def forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        first_positions: torch.Tensor,
        *cache: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """One step.

        Args:
            token_ids: int64 [B, T].
            position_ids: int64 [B, T], -1 where a token is padding.
            first_positions: int64 [B, T], the first position that each token may see.
            cache: slot_positions int64 [B, slots] of the G windows, -1 where a slot is empty; then past keys of
                the N layers, then their past values.

        Returns:
            logits float32 [B, V] of the last token, new keys [B, K, T, D] of the N layers, new values.
        """
        groups = len(self.cache_spec.windows)
        slots, keys, values = cache[:groups], cache[groups : groups + self.layers], cache[groups + self.layers :]
        step_cache = StepCache(self.form, position_ids, first_positions, self._past(slots, keys, values))
        logits = self._run(token_ids, position_ids, step_cache)
        return (logits, *_in_layer_order(step_cache.new_keys), *_in_layer_order(step_cache.new_values))

    def example_inputs(self, shape: StepShape) -> tuple[torch.Tensor, ...]:
        """Inputs of the right sizes for ``shape``, with an empty cache, to trace or warm up with."""
        ids = torch.zeros(shape.batch, shape.tokens, dtype=torch.int64, device="cpu")
        slots = empty_slots(self.cache_spec, shape.batch, shape.cache_length)
        past = KVBuffers(self.cache_spec, shape.batch, shape.cache_length, self.form.transposed_keys, windowed=True)
        positions = torch.arange(shape.tokens, device="cpu").expand(shape.batch, -1).contiguous()
        return (ids, positions, torch.zeros_like(ids), *slots, *past.keys, *past.values)

    def rotations(self) -> list[Rotation | None]:
        if self._found_rotations is None:
            self._found_rotations = self._find_rotations()
        return self._found_rotations

    @torch.no_grad()
    def _find_rotations(self) -> list[Rotation | None]:
        ids = torch.tensor([[1], [2], [5], [7]], device="cpu") % self.vocab_size
        keys = {}
        for position in (0, 1, 5):  # within any model's trained length
            cache = StepCache(self.form, torch.full_like(ids, position))
            self._run(ids, torch.full_like(ids, position), cache)
            keys[position] = _in_layer_order(cache.new_keys)
        tables = [table for name, table in self.model.named_buffers() if name.endswith("inv_freq")]
        known = [Rotation(table.double().flatten(), arranged) for table in tables for arranged in (False, True)]
        found: list[Rotation | None] = []
        for index in range(self.layers):
            at = [(position, layers[index].transpose(1, 2).flatten(0, 1)) for position, layers in keys.items()]
            try:
                found.append(find_rotation(at, known, 1e-4 if self.dtype == torch.float32 else 0.03))
            except LookupError as error:
                raise UnsupportedModelError(
                    f"model_type {self.model.config.model_type!r} cannot move its cached keys to other positions: {error}"
                ) from error
        return found

    def _past(
        self, slots: Sequence[torch.Tensor], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> dict[int, Past]:
        """What the cache holds, by the index that a layer has in the model."""
        windows = self.cache_spec.windows
        past = {}
        for index, spec, key, value in zip(self._caching, self.cache_spec.layers, keys, values, strict=True):
            group = windows.index(spec.window)
            past[index] = Past(key, value, slots[group], group)
        return past

    def _run(self, token_ids: torch.Tensor, position_ids: torch.Tensor, cache: StepCache) -> torch.Tensor:
        positions = {"position_ids": position_ids.clamp(min=0)} if self._takes_positions else {}
        output = self.model(
            input_ids=token_ids,
            use_cache=True,
            **positions,
            **{self._cache_argument: cache},
            **self._last_logits_only,
            **self._legacy_arguments,
        )
        return output.logits[:, -1].float()

    def _run_in_two_steps(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits as a session gets them: left-padded, and then over a past with empty slots, out of order."""
        cut = ids.shape[1] // 2
        padding = torch.full((1, 2), EMPTY, device="cpu")
        padded = torch.cat([padding, positions[:, :cut]], dim=1)
        first = StepCache(self.form, padded)
        self._run(torch.cat([padding * 0, ids[:, :cut]], dim=1), padded, first)
        order = torch.arange(cut + 1, -1, -1, device="cpu")
        past = {}
        for index, key in first.new_keys.items():
            keys = key[:, :, order].transpose(2, 3) if self.form.transposed_keys else key[:, :, order]
            past[index] = Past(keys, first.new_values[index][:, :, order], padded[:, order], 0)
        return self._run(ids[:, cut:], positions[:, cut:], StepCache(self.form, positions[:, cut:], None, past))

    @torch.no_grad()
    def _probe(self, model: PreTrainedModel) -> CacheSpec:
        """Run a few tokens through the step and through the model itself.

        This finds the sizes of the cache without reading a config, and refuses models whose attention
        this package cannot express instead of generating wrong tokens from them.
        """
        config = model.config.get_text_config()

        def refusal(reason: object) -> UnsupportedModelError:
            return UnsupportedModelError(
                f"model_type {model.config.model_type!r} cannot run as a static step: {reason}"
            )

        window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
        # With a small window, enough tokens to see its edge.
        tokens = max(_PROBE_TOKENS, window + 3) if window is not None and window < 64 else _PROBE_TOKENS
        limit = position_limit(model)
        tokens = tokens if limit is None else min(tokens, limit)
        positions = torch.arange(tokens, device="cpu")[None]
        ids = (positions * 7 + 1).remainder(self.vocab_size)
        cache = StepCache(self.form, positions)
        try:
            logits = self._run(ids, positions, cache)
            again = self._run_in_two_steps(ids, positions)
        except UnsupportedModelError as error:
            raise refusal(error) from error
        except Exception as error:
            raise refusal(
                f"its forward fails with keys and values kept apart ({type(error).__name__}: {error})"
            ) from error
        layers = config.num_hidden_layers
        unrouted = set(range(layers)) - set(cache.windows) | set(cache.new_keys) - set(cache.windows)
        if unrouted:
            raise refusal(
                f"{len(unrouted)} of its {layers} layers do not use attention through transformers' "
                "AttentionInterface and Cache"
            )
        for index, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
            if (layer_type == "sliding_attention") != (cache.windows[index] is not None):
                raise refusal(
                    f"layer {index} is {layer_type!r} but gives its attention sliding_window={cache.windows[index]}"
                )
        freeze_rotary_embeddings(self.model)
        own = _clone_sharing_weights(model)
        own.set_attn_implementation("eager")  # sdpa of transformers 5.5 leaves out the soft-capping of Gemma 2
        expected = own(input_ids=ids, use_cache=False).logits[:, -1].float()
        if not torch.isfinite(expected).all():
            raise refusal("its logits are not finite; check that its weights are")
        scale = expected.abs().max().item()
        tolerance = 1e-4 if next(iter(cache.new_keys.values())).dtype == torch.float32 else 0.1
        for found, how in ((logits, "in one step"), (again, "in two steps with padding")):
            difference = (found - expected).abs().max().item()
            if not difference <= tolerance * max(scale, 1e-6):
                raise refusal(
                    f"on {tokens} tokens {how} the logits differ by {difference:.3g} from its own (up to {scale:.3g}), "
                    "so it does more than its attention is told"
                )
        self.position_limit = limit
        unseen = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
        if unseen and not getattr(config, "layer_types", None) and not any(cache.windows.values()):
            # A window that the model keeps to itself: right as long as the text is shorter.
            self.position_limit = unseen if limit is None else min(limit, unseen)
        self.logits_size = logits.shape[1]
        self._caching = sorted(cache.new_keys)
        return cache_spec_of(cache)


def cache_spec_of(cache: StepCache) -> CacheSpec:
    """What the layers of a model cache, by what a step of it left."""
    caching = sorted(cache.new_keys)
    specs = []
    for index in caching:
        key, value = cache.new_keys[index], cache.new_values[index]
        # Layers that read another one's keys and values need what they see of them, too.
        readers = [cache.windows[reader] for reader, source in cache.sources.items() if source == index]
        reach = None if None in readers else max(reader for reader in readers if reader)
        specs.append(LayerSpec(key.shape[1], key.shape[3], value.shape[3], reach))
    return CacheSpec(tuple(specs), cache.new_keys[caching[0]].dtype)


# The steps of each model, one per form. A step refers to a copy of the model's modules, not to the model, so
# that an entry dies with its model.
_steps: weakref.WeakKeyDictionary[PreTrainedModel, dict[StepForm, Step]] = weakref.WeakKeyDictionary()
_steps_lock = threading.Lock()


def step_for(model: PreTrainedModel, form: StepForm) -> Step:
    """The step of this model in this form; see :class:`Step`. Made once, and anew when the model has changed."""
    check_model(model)
    with _steps_lock:
        steps = _steps.setdefault(model, {})
        if form not in steps or steps[form].stamp != model_stamp(model):
            with torch.autocast("cpu", enabled=False):  # the caller's, in which the step would not be the model
                steps[form] = Step(model, form)
        return steps[form]


def model_stamp(model: PreTrainedModel) -> str:
    """A digest that changes when the model does: its modules, its config, or its weights.

    Compiled programs hold the numbers that they were compiled with. Of every tensor it takes place, dtype,
    version and 64 numbers, which takes milliseconds where all numbers would take seconds; an edit through
    ``.data`` or numpy, which has no version, is seen when it touches one of those.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(computing_fields(model.config.to_dict()), sort_keys=True, default=repr).encode())
    for module in model.modules():
        digest.update(f"{type(module).__qualname__}{id(module)}".encode())
    # Rotary frequencies that depend on the length are rewritten by every forward, by what the config says.
    rewritten = "inv_freq" if _length_limits(model.config.get_text_config()) else "\0"
    buffers = [buffer for name, buffer in model.named_buffers() if not name.endswith(rewritten)]
    for tensor in [*model.parameters(), *buffers]:
        version = 0 if tensor.is_inference() else tensor._version
        digest.update(f"{tensor.data_ptr()} {tensor.dtype} {tuple(tensor.shape)} {version}".encode())
        numbers = tensor.detach().reshape(-1)
        sample = numbers[:: max(1, numbers.numel() // _SAMPLES)].cpu().contiguous()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_model(model: PreTrainedModel) -> None:
    """Refuse what can be refused without running anything; see :class:`Step` for the errors."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers PreTrainedModel, got {type(model).__module__}.{type(model).__qualname__}; "
            "load one with AutoModelForCausalLM.from_pretrained (and merge adapters first)"
        )
    config, kind = model.config, model.config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"model_type {kind!r} is an encoder-decoder; a causal decoder is needed")
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {kind!r}) is not a causal decoder with a language-model head; "
            "load it with AutoModelForCausalLM.from_pretrained"
        )
    require_known_layers(config)
    dtypes = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    if not dtypes <= _DTYPES:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes - _DTYPES))
        raise UnsupportedModelError(
            f"model has weights in {names}; supported are {', '.join(sorted(map(str, _DTYPES)))}: "
            "load it with dtype=torch.float32"
        )
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise ValueError(
            f"model is on {', '.join(sorted(devices))}; staticgen reads its weights from the CPU: call model.to('cpu')"
        )


def require_known_layers(config: Any) -> None:
    """Refuse a model with layers of a type that no step has."""
    unknown = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if unknown:
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} has layers of type {', '.join(sorted(unknown))}; "
            f"supported are {', '.join(sorted(_KNOWN_LAYER_TYPES))}"
        )


def vocab_size(model: PreTrainedModel) -> int:
    """V, the number of token ids that the model can embed."""
    weight: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    return weight.shape[0]


def position_limit(model: PreTrainedModel) -> int | None:
    """How many positions the model can number, or None where there is no hard limit.

    Learned position tables (GPT-2, OPT) end; rotary embeddings go on, except those whose frequencies
    switch or scale at the trained length.
    """
    config = model.config.get_text_config()
    trained = getattr(config, "max_position_embeddings", None)
    if trained is None:
        return None
    if limits := _length_limits(config):
        return min(limits)
    tokens = model.get_input_embeddings()
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens]
    # GPT-J and CTRL keep theirs as a buffer, or as a tensor that is none.
    for module in model.modules():
        held = [*module.named_buffers(recurse=False), *vars(module).items()]
        tables += [
            value for name, value in held if isinstance(value, torch.Tensor) and "pos" in name and value.dim() == 2
        ]
    return int(trained) if any(table.shape[0] >= trained for table in tables) else None


def _length_limits(config: Any) -> list[int]:
    """The trained lengths of those rotary embeddings whose frequencies depend on the length of the text."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [
        int(part.get("original_max_position_embeddings") or config.max_position_embeddings)
        for part in (rope, *rope.values())  # one for all layers, or one per type of layer
        if isinstance(part, dict) and part.get("rope_type") in _LENGTH_DEPENDENT_ROPE
    ]


def _clone_sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the modules and the configs but not the tensors; in evaluation mode.

    Whatever is set on the copy (its attention, its mode) leaves the user's model alone.
    """
    shared = {id(tensor): tensor for tensor in model.parameters()}  # not buffers: a forward may write to those
    try:
        return copy.deepcopy(model, memo=shared).eval()
    except Exception as error:
        raise UnsupportedModelError(
            f"model cannot be copied, because something attached to it cannot ({type(error).__name__}: {error}); remove that"
        ) from error


def freeze_rotary_embeddings(model: nn.Module) -> None:
    """Keep the frequencies that apply up to the trained length, which no step goes beyond.

    Their modules would look at the length in every forward, and share one tensor between two buffers, which
    a trace refuses.
    """
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # one per type of layer
            frozen: Any = dict.fromkeys(kind, "default")
        elif kind in _LENGTH_DEPENDENT_ROPE:
            frozen = "default"
        else:
            continue
        module.rope_type = frozen
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.clone())


def _in_layer_order(tensors: dict[int, torch.Tensor]) -> Sequence[torch.Tensor]:
    return [tensors[index] for index in sorted(tensors)]

"""A little decoder as a function of devices: its StableHLO lowered by jax, and the same model in torch to compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from staticgen.functions import Function, Lowered, TensorSpec


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder without positions: grouped attention and a gated MLP in each layer."""

    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 8
    hidden: int = 32
    intermediate: int = 64
    vocabulary: int = 96
    slots: int = 24
    dtype: torch.dtype = torch.float32
    fused: bool = False  # whether gate and up are one weight

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights, by the names that transformers has for them."""
        rows, few = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = {"model.model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            at = f"model.model.layers.{layer}."
            found |= {
                at + "self_attn.q_proj.weight": (rows, self.hidden),
                at + "self_attn.k_proj.weight": (few, self.hidden),
                at + "self_attn.v_proj.weight": (few, self.hidden),
                at + "self_attn.o_proj.weight": (self.hidden, rows),
                at + "mlp.down_proj.weight": (self.hidden, self.intermediate),
            }
            if self.fused:
                found[at + "mlp.gate_up_proj.weight"] = (2 * self.intermediate, self.hidden)
            else:
                found[at + "mlp.gate_proj.weight"] = (self.intermediate, self.hidden)
                found[at + "mlp.up_proj.weight"] = (self.intermediate, self.hidden)
        return found | {"model.lm_head.weight": (self.vocabulary, self.hidden)}

    def weights(self) -> dict[str, torch.Tensor]:
        torch.manual_seed(6)  # one with which it says many things
        return {
            name: (torch.randn(shape) * (3.0 / shape[-1] ** 0.5)).to(self.dtype)
            for name, shape in self.shapes().items()
        }

    def function(self) -> Function:
        """One greedy step: token in, next token out, keys and values written where they were."""
        cache = TensorSpec((self.layers, 1, self.kv_heads, self.slots, self.head_dim), self.dtype)
        state = {
            "token_ids": TensorSpec((1, 1), torch.int32),
            "slots": TensorSpec((1,), torch.int32),
            "filled": TensorSpec((1, self.slots), torch.bool),
            "keys.0": cache,
            "values.0": cache,
        }
        weights = {f"weights.{name}": TensorSpec(shape, self.dtype) for name, shape in self.shapes().items()}
        logits = TensorSpec((1, self.vocabulary), torch.float32)
        return Function("greedy", {**weights, **state}, {**state, "logits": logits}, {name: name for name in state})

    def lowered(self) -> Lowered:
        """That step as StableHLO."""
        import jax
        import jax.export

        function = self.function()
        avals = [
            jax.ShapeDtypeStruct(spec.shape, str(spec.dtype).removeprefix("torch."))
            for spec in function.inputs.values()
        ]
        exported = jax.export.export(jax.jit(self._step, keep_unused=True), platforms=["cpu"])(*avals)
        return Lowered(function, exported.mlir_module_serialized)

    def _step(self, *inputs):
        import jax
        import jax.numpy as jnp

        given = dict(zip(self.function().inputs, inputs, strict=True))
        slot, keys, values = given["slots"][0], given["keys.0"], given["values.0"]
        filled = given["filled"].at[0, slot].set(True)
        x = given["weights.model.model.embed_tokens.weight"][given["token_ids"][:, 0]]
        for layer in range(self.layers):

            def weight(name, layer=layer):
                return given[f"weights.model.model.layers.{layer}.{name}.weight"].T

            h = x / jnp.sqrt(jnp.mean(x * x) + 1e-6)
            q = (h @ weight("self_attn.q_proj")).reshape(self.kv_heads, -1, self.head_dim)
            new = [
                (h @ weight(f"self_attn.{name}_proj")).reshape(1, 1, self.kv_heads, 1, self.head_dim) for name in "kv"
            ]
            keys = jax.lax.dynamic_update_slice(keys, new[0], (layer, 0, 0, slot, 0))
            values = jax.lax.dynamic_update_slice(values, new[1], (layer, 0, 0, slot, 0))
            scores = jnp.einsum("kgd,ksd->kgs", q, keys[layer, 0]) / math.sqrt(self.head_dim)
            part = jax.nn.softmax(jnp.where(filled[0], scores.astype(jnp.float32), -1e9)).astype(x.dtype)
            x = x + jnp.einsum("kgs,ksd->kgd", part, values[layer, 0]).reshape(1, -1) @ weight("self_attn.o_proj")
            h = x / jnp.sqrt(jnp.mean(x * x) + 1e-6)
            if self.fused:
                gate, up = jnp.split(h @ weight("mlp.gate_up_proj"), 2, axis=1)
            else:
                gate, up = h @ weight("mlp.gate_proj"), h @ weight("mlp.up_proj")
            x = x + (jax.nn.silu(gate) * up) @ weight("mlp.down_proj")
        x = x / jnp.sqrt(jnp.mean(x * x) + 1e-6)
        logits = (x @ given["weights.model.lm_head.weight"].T).astype(jnp.float32)
        token = jnp.argmax(logits, axis=1).astype(jnp.int32)[:, None]
        return token, given["slots"] + 1, filled, keys, values, logits

    def reference(self, token: int, steps: int) -> tuple[list[int], list[torch.Tensor]]:
        """Tokens and logits in torch, everything computed anew for each, without a cache."""
        weights = {name: tensor.float() for name, tensor in self.weights().items()}
        tokens, logits = [token], []
        for _ in range(steps):
            x = weights["model.model.embed_tokens.weight"][tokens]
            for layer in range(self.layers):
                at = f"model.model.layers.{layer}."

                def project(h, name, at=at):
                    return functional.linear(h, weights[f"{at}{name}.weight"])

                h = functional.rms_norm(x, x.shape[-1:], eps=1e-6)
                q, k, v = (
                    project(h, f"self_attn.{name}_proj").unflatten(1, (-1, self.head_dim)).transpose(0, 1)[None]
                    for name in "qkv"
                )
                met = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                x = x + project(met[0].transpose(0, 1).flatten(1), "self_attn.o_proj")
                h = functional.rms_norm(x, x.shape[-1:], eps=1e-6)
                if self.fused:
                    gate, up = project(h, "mlp.gate_up_proj").chunk(2, dim=1)
                else:
                    gate, up = project(h, "mlp.gate_proj"), project(h, "mlp.up_proj")
                x = x + project(functional.silu(gate) * up, "mlp.down_proj")
            x = functional.rms_norm(x, x.shape[-1:], eps=1e-6)
            logits.append(functional.linear(x[-1:], weights["model.lm_head.weight"]))
            tokens.append(int(logits[-1].argmax()))
        return tokens[1:], logits


def start(engine, decoder: Decoder, token: int) -> dict[str, object]:
    """Every input of the step on a device, the cache empty."""
    function, weights = decoder.function(), decoder.weights()
    tensors = {f"weights.{name}": tensor for name, tensor in weights.items()}
    for name, spec in function.inputs.items():
        if name not in tensors:
            tensors[name] = torch.zeros(spec.shape, dtype=spec.dtype)
    tensors["token_ids"].fill_(token)
    return {name: engine.upload(tensors[name], name) for name in function.inputs}


def decode(engine, executable, buffers: dict[str, object], steps: int) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens and logits; nothing is waited for until the last step is called."""
    names = executable.function.outputs
    told = []
    for _ in range(steps):
        outputs = dict(zip(names, executable([buffers[name] for name in executable.function.inputs]), strict=True))
        told.append(outputs.pop("logits"))
        buffers.update(outputs)
    logits = [engine.download(one) for one in told]
    return [int(one.argmax()) for one in logits], logits

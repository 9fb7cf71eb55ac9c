"""What a bundle should say: the reference's tokens and logits for a few prompts, and how far another run is from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import GenerationConfig

from staticgen.bundle import Bundle
from staticgen.compiled import CompiledModel
from staticgen.errors import BundleError
from staticgen.session import Session

CERTIFICATE = "certificate.safetensors"
_PARTS = ("prompt", "tokens", "logits")


@dataclass(frozen=True)
class Golden:
    """One prompt and what the reference makes of it.

    Attributes:
        prompt: int64 [t].
        tokens: int64 [n], its greedy continuation.
        logits: float32 [n, V], that each of them was chosen from.
    """

    prompt: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Comparison:
    """How far a run's logits are from the reference's for one prompt; it was fed the reference's tokens.

    Attributes:
        prompt_tokens, steps: how long the prompt was, and how many tokens were compared.
        diverges_at: the first step at which another token would have been chosen; None where there is none.
        expected, found: the tokens at that step.
        largest_difference: of any two logits.
        kl: the largest Kullback-Leibler divergence of a step's distribution from the reference's, in nats.
    """

    prompt_tokens: int
    steps: int
    diverges_at: int | None
    expected: int | None
    found: int | None
    largest_difference: float
    kl: float

    def to_dict(self) -> dict[str, Any]:
        """The same for a manifest, or to print as JSON."""
        return asdict(self)


@torch.no_grad()
def ask_reference(model: Any, prompts: Sequence[Sequence[int]], steps: int) -> list[Golden]:
    """What a transformers model makes of prompts, by its own forward over the whole text, without any cache."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device="cpu")
        logits = []
        for _ in range(steps):
            logits.append(
                model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -1].float()
            )
            ids = torch.cat([ids, logits[-1].argmax()[None, None]], dim=1)
        found.append(Golden(ids[0, : len(prompt)], ids[0, len(prompt) :], torch.stack(logits)))
    return found


def save_golden(golden: Sequence[Golden], path: Path) -> None:
    """Write them to a safetensors file."""
    tensors: dict[str, torch.Tensor] = {}
    for index, one in enumerate(golden):
        tensors |= {f"{name}.{index}": getattr(one, name).contiguous() for name in _PARTS}
    path.write_bytes(safetensors.torch.save(tensors))


def load_golden(bundle: Bundle) -> list[Golden]:
    """The reference's answers that a bundle holds."""
    try:
        tensors = safetensors.torch.load_file(bundle.path(CERTIFICATE))
        return [_golden(tensors, index) for index in range(len(tensors) // len(_PARTS))]
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise BundleError(
            f"bundle {str(bundle.folder)!r}: its {CERTIFICATE} cannot be read ({error}); make it anew with "
            "`staticgen compile`"
        ) from error


def _golden(tensors: Mapping[str, torch.Tensor], index: int) -> Golden:
    prompt, tokens, logits = (tensors[f"{name}.{index}"] for name in _PARTS)
    sizes = [list(tensor.shape) for tensor in (prompt, tokens, logits)]
    dtypes = (prompt.dtype, tokens.dtype, logits.dtype)
    steps, width = tokens.numel(), logits.shape[-1] if logits.dim() else 0
    ids = torch.cat([prompt.flatten(), tokens.flatten()])
    good = dtypes == (torch.int64, torch.int64, torch.float32) and sizes == [[prompt.numel()], [steps], [steps, width]]
    if not good or not prompt.numel() or not steps or not (0 <= int(ids.min()) <= int(ids.max()) < width):
        raise ValueError(f"prompt {index} has tensors {dtypes} of sizes {sizes} that do not fit")
    return Golden(prompt, tokens, logits)


def stand_in_arguments(model: CompiledModel) -> dict[str, Any]:
    """Arguments of a session that runs a bundle on this machine's CPU in place of its own device."""
    if model.backend == "npu":
        return {"backend_options": {"NPUW_DEVICES": "CPU"}}
    if model.backend == "xla":
        return {"device": "cpu", "backend_options": {"mesh": "1"}}
    return {"device": "CPU"}


def compare(session: Session, golden: Sequence[Golden], vocab_size: int) -> list[Comparison]:
    """Replay the reference's answers in a session: it is fed their tokens, and its own logits are looked at."""
    return [_compare_one(session, one, vocab_size) for one in golden]


def loop_differs(session: Session, golden: Golden) -> int | None:
    """The first token that a device which chooses by itself chooses otherwise than the reference; None where none is."""
    output = session.generate(
        golden.prompt[None], torch.ones_like(golden.prompt)[None], generation_config=GenerationConfig(),
        max_new_tokens=len(golden.tokens), do_sample=False, eos_token_id=[],
    )  # fmt: skip
    differ = (output[0, len(golden.prompt) :] != golden.tokens).nonzero().flatten().tolist()
    return differ[0] if differ else None


def _compare_one(session: Session, golden: Golden, vocab_size: int) -> Comparison:
    steps, begun = len(golden.tokens), len(golden.prompt)

    def force(history: torch.Tensor) -> torch.Tensor:
        allowed = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
        allowed[golden.tokens[history.shape[1] - begun]] = True
        return allowed

    output = session.generate(
        golden.prompt[None], torch.ones_like(golden.prompt)[None], max_new_tokens=steps, do_sample=False, num_beams=1,
        num_return_sequences=1, eos_token_id=[], token_mask=force, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    logits = torch.stack([one[0] for one in output.logits])
    expected, found = golden.logits.argmax(dim=-1), logits.argmax(dim=-1)
    differ = (expected != found).nonzero().flatten().tolist()
    at = differ[0] if differ else None
    wanted, given = golden.logits.double().log_softmax(-1), logits.double().log_softmax(-1)
    chances = wanted.exp()
    return Comparison(
        prompt_tokens=begun,
        steps=steps,
        diverges_at=at,
        expected=None if at is None else int(expected[at]),
        found=None if at is None else int(found[at]),
        largest_difference=float((golden.logits - logits).abs().max()),
        kl=float(torch.where(chances == 0, 0.0, chances * (wanted - given)).sum(-1).max().clamp(min=0)),  # or NaN
    )

"""A model's step as OpenVINO IR files, one per size."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import openvino as ov
from transformers import PreTrainedModel

from staticgen.backends.ir import feeds_of, static_model
from staticgen.feeds import write_feeds
from staticgen.limits import fit_buckets, require_positions
from staticgen.profiles import load_profile
from staticgen.shapes import StepShape
from staticgen.step import step_for


def export_ir(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    profile: str = "intel-npu",
    max_length: int = 512,
    batch_size: int = 1,
    prefill_buckets: Sequence[int] | None = None,
    compress_to_fp16: bool = False,
) -> list[Path]:
    """Write the steps that a session of these sizes replays: ``decode.xml`` and ``prefill_N.xml``.

    Every dimension is fixed and nothing is stateful; inputs and outputs are named ``token_ids``, ``position_ids``,
    ``first_positions``, ``slot_positions.0`` ..., ``past_key.0`` ..., ``logits``, ``new_key.0`` ... Each file has its own copy of the weights.
    Where the profile's steps are fed by the host, ``embeddings``, ``cos.0``, ``mask.0`` ... stand in the place of ids and positions, and
    ``feeds.json`` and ``feeds.safetensors`` say how to work them out: :func:`staticgen.feeds.read_feeds`.

    Args:
        model: a causal decoder of transformers, on the CPU.
        folder: must not exist; it appears when everything in it is written, or not at all.
        profile: the target, which decides the form of the step; no device is needed.
        max_length, batch_size, prefill_buckets: as in :class:`staticgen.Session`.
        compress_to_fp16: store float32 weights as float16, the precision of an NPU.

    Returns:
        The ``.xml`` files, decode first; each has a ``.bin`` beside it.

    Raises:
        FileExistsError: ``folder`` exists.
        UnsupportedModelError, CompileError, UnknownNameError, ValueError: as for a session.
    """
    target = Path(folder)
    if target.exists():
        raise FileExistsError(f"folder {str(folder)!r} exists already; choose another or remove it")
    wanted = load_profile(profile)
    buckets = fit_buckets(prefill_buckets, wanted.prefill_buckets, max_length)
    step = step_for(model, wanted.form)
    require_positions(step, max_length)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        feeds = feeds_of(step)
        if feeds is not None:
            write_feeds(feeds, unfinished)
        names = {"decode": 1, **{f"prefill_{tokens}": tokens for tokens in buckets}}
        for name, tokens in names.items():
            static = static_model(step, StepShape(batch_size, tokens, max_length))
            ov.save_model(static, unfinished / f"{name}.xml", compress_to_fp16=compress_to_fp16)
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return [target / f"{name}.xml" for name in names]

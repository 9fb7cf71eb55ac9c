"""Compiles programs for a TPU in a process of its own: ``python tpu_worker.py REQUEST ANSWERS``.

libtpu reads the environment when it is loaded, prints on its own, and ends the process where one of its checks fails;
none of that is to happen to whoever asks. The request is a JSON object of :func:`staticgen.compile.tpu.account_all`;
the answers are lines of JSON, one for each program as soon as it is compiled.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from staticgen.functions import Function, Lowered
from staticgen.jax_programs import lower_program, serialize


def main(request: Path, answers: Path) -> None:
    """Answer one request."""
    asked = json.loads(request.read_bytes())
    topologies = importlib.import_module("jax.experimental.topologies")
    config = {} if asked["chip_config"] is None else {"chip_config_name": asked["chip_config"]}
    topology = topologies.get_topology_desc(asked["topology"], platform="tpu", **config)
    devices = topology.devices[: asked["mesh"]]
    with answers.open("w", encoding="utf-8") as file:
        for program in asked["programs"]:
            function = Function.from_dict(program["function"])
            try:
                lowered = lower_program(Lowered(function, Path(program["stablehlo"]).read_bytes()), devices)
                answer = _account(lowered, asked["options"], asked["reading_options"], program["executable"])
            except Exception as error:  # jax and MLIR have several classes, RuntimeError and ValueError among them
                answer = {"error": str(error)}
            print(json.dumps(answer), file=file, flush=True)


def _account(
    lowered: Any, options: dict[str, str], reading_options: dict[str, str], executable: str | None
) -> dict[str, Any]:
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=options or None)
    seconds = time.perf_counter() - start
    if executable is not None:
        Path(executable).write_bytes(serialize(compiled))
    memory = compiled.memory_analysis()
    try:
        cost = lowered.compile(compiler_options={**options, **reading_options}).cost_analysis()
        bytes_accessed = int(cost["bytes accessed"])
    except RuntimeError:  # the chip has no room for it in that form, which is made for the count only
        bytes_accessed = None
    return {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "bytes_accessed": bytes_accessed,
        "flops": int(compiled.cost_analysis()["flops"]),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

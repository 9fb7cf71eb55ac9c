"""Every model family, token for token against transformers. What passed is the table in the README."""

import textwrap
from functools import lru_cache
from pathlib import Path

import pytest
import transformers
from families import FAMILIES, REFUSED
from models import new_tokens, random_prompt, reference

from staticgen import CompileError, Session, UnsupportedModelError

BACKENDS = ["eager", "openvino"]
LAYOUTS = ["ring", "shift", "sink", "none"]
CASES = [(family, variant) for family in FAMILIES for variant in family.variants]
REFUSED_CASES = [(family, variant) for family in REFUSED for variant in family.variants]

RECENT = (5, 24)  # the version that the README's table is written with
OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < RECENT

# What this run found: for a model and a backend what became of each layout, and which models were refused.
found: dict[tuple[str, str, str], dict[str, str]] = {}
refused: dict[tuple[str, str], bool] = {}


pytestmark = pytest.mark.usefixtures("one_thread")


def names(cases):
    return [" ".join(filter(None, (family.name, variant))) for family, variant in cases]


def skip_what_is_missing(family):
    if family.model_class is None:
        pytest.skip(f"this version of transformers has no {family.model}")


@lru_cache(maxsize=1)
def judged(family, variant):
    """A model, the prompts, and what transformers generates for each alone."""
    model = family.build(variant)
    prompts = [random_prompt(length) for length in (3, 12, 340 if variant == family.long else 20)]
    return model, prompts, [reference(model, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("backend", BACKENDS)  # the one that changes first, so that a model is built once
@pytest.mark.parametrize(("family", "variant"), CASES, ids=names(CASES))
def test_a_ragged_batch_gives_the_tokens_of_transformers(family, variant, backend):
    """C03, C13, C20 to C26, C29: in every layout, which share what is compiled."""
    skip_what_is_missing(family)
    outcome = found[family.name, variant, backend] = {}
    model, prompts, expected = judged(family, variant)
    assert len({token for row in expected for token in row}) >= 4, "the fixture is blind: too few distinct tokens"
    max_length = 64 if variant != family.long else 400
    try:
        session = Session(model, max_length=max_length, batch_size=3, prefill_buckets=[8, 32], backend=backend)
    except (UnsupportedModelError, CompileError) as error:
        if OLD and variant in family.recent:
            pytest.skip(f"transformers {transformers.__version__}: {error}")
        raise
    compiled = session.stats.compiles
    for layout in LAYOUTS:
        if layout == "sink" and not family.moves:
            kind = model.config.model_type
            with pytest.raises(UnsupportedModelError, match=f"model_type '{kind}' cannot move its cached keys"):
                session.set_cache_implementation(layout)
            outcome[layout] = "no"
            continue
        session.set_cache_implementation(layout)
        assert session.stats.compiles == compiled or layout == "none"
        assert new_tokens(session.generate(prompts, max_new_tokens=24), len(prompts[-1])) == expected, layout
        outcome[layout] = "yes"


@pytest.mark.parametrize(("family", "variant"), REFUSED_CASES, ids=names(REFUSED_CASES))
def test_what_cannot_be_a_static_step_is_refused_before_anything_is_compiled(family, variant, monkeypatch):
    """C14."""
    skip_what_is_missing(family)
    if OLD and variant in family.recent:
        pytest.skip(f"transformers {transformers.__version__} writes it in a way that can run")
    refused[family.name, variant] = False
    model = family.build(variant)
    monkeypatch.setattr("staticgen.backends.eager.EagerBackend.compile", lambda *args: pytest.fail("it compiles"))
    with pytest.raises(UnsupportedModelError, match=f"model_type '{model.config.model_type}'"):
        Session(model, max_length=64, backend="eager")
    refused[family.name, variant] = True


def said(family, layouts, backends):
    """What the table says of a family: "yes" only if all of its models gave the right tokens in this run."""
    outcomes = [found[family.name, variant, backend] for variant in family.variants for backend in backends]
    answers = {outcome.get(layout, "wrong") for outcome in outcomes for layout in layouts}
    return "wrong" if "wrong" in answers else " and ".join(sorted(answers, reverse=True))


def table():
    """The README's text between its markers."""
    lines = [
        "| family | class in transformers | ring, shift, none | sink | eager | openvino |",
        "|---|---|---|---|---|---|",
    ]
    for family in sorted(FAMILIES, key=lambda family: family.name.lower()):
        variants = "; ".join(filter(None, family.variants))
        held = ["ring", "shift", "none"] + ["sink"] * family.moves
        cells = [
            f"{family.name} ({variants})" if variants else family.name,
            f"`{family.model}`",
            said(family, ["ring", "shift", "none"], BACKENDS),
            said(family, ["sink"], BACKENDS),
            *(said(family, held, [backend]) for backend in BACKENDS),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    kinds = [family.name for family in REFUSED if all(refused[family.name, variant] for variant in family.variants)]
    recent = [
        family.name + f" ({', '.join(family.recent)})" * any(family.recent) for family in FAMILIES if family.recent
    ]
    text = (
        f"With transformers 5.5.4 {', '.join(recent)} are refused by name. "
        "`sink` is refused by name where a model's keys cannot move to other positions. Refused before anything is "
        f"compiled are {', '.join(kinds)}; and, in `tests/test_step.py`, BART, BERT, Mamba and T5."
    )
    return "\n".join([*lines, "", *textwrap.wrap(text, 120)])


def test_the_readme_has_the_table_of_this_run(request):
    missing = [family.model for family in FAMILIES + REFUSED if family.model_class is None]
    if missing:
        pytest.skip(f"this version of transformers has no {', '.join(missing)}")
    if OLD:
        pytest.skip(f"the table is of transformers {RECENT[0]}.{RECENT[1]} and later")
    asked = {(family.name, variant, backend) for family, variant in CASES for backend in BACKENDS}
    if found.keys() != asked or refused.keys() != {(family.name, variant) for family, variant in REFUSED_CASES}:
        pytest.skip("only a part of this file was run")
    readme = Path(__file__).parent.parent / "README.md"
    before, start, rest = readme.read_text(encoding="utf-8").partition("<!-- families -->\n")
    written, end, after = rest.partition("\n<!-- /families -->")
    assert start and end, "README.md has lost its markers <!-- families --> and <!-- /families -->"
    if request.config.getoption("--write-families"):
        readme.write_text(before + start + table() + end + after, encoding="utf-8")
    else:
        assert written == table(), "run pytest tests/test_families.py --write-families"

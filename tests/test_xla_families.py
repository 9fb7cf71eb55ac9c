"""Every model family on the devices of backend ``xla``, token for token against transformers."""

from functools import lru_cache

import pytest
from families import FAMILIES
from models import new_tokens, random_prompt, reference
from on_xla import DEVICES

from staticgen import Session, UnsupportedModelError

CASES = [(family, variant) for family in FAMILIES for variant in family.variants]


pytestmark = pytest.mark.usefixtures("one_thread")


@lru_cache(maxsize=1)
def judged(family, variant):
    """A model, the prompts, and what transformers generates for each alone."""
    model = family.build(variant)
    prompts = [random_prompt(length) for length in (3, 300 if variant == family.long else 12)]
    return model, prompts, [reference(model, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("device", DEVICES)  # the one that changes first, so that a model is built once
@pytest.mark.parametrize(
    ("family", "variant"), CASES, ids=[" ".join(filter(None, (family.name, variant))) for family, variant in CASES]
)
def test_a_ragged_batch_gives_the_tokens_of_transformers(family, variant, device):
    if family.model_class is None:
        pytest.skip(f"this version of transformers has no {family.model}")
    model, prompts, expected = judged(family, variant)
    assert len({token for row in expected for token in row}) >= 4, "the fixture is blind: too few distinct tokens"
    width = max(map(len, prompts))
    session = Session(
        model,
        max_length=width + 20,
        batch_size=2,
        prefill_buckets=[8],
        cache_sizes=[],
        backend="xla",
        device=device,
    )
    for layout in ("ring", "shift", "sink", *(["none"] if device == "null" else [])):
        if layout == "sink" and not family.moves:
            with pytest.raises(UnsupportedModelError, match="cannot move its cached keys"):
                session.set_cache_implementation(layout)
            continue
        session.set_cache_implementation(layout)
        assert new_tokens(session.generate(prompts, max_new_tokens=20), width) == expected, layout
        assert session.stats.last.loop == ("device" if layout in ("ring", "shift") else "host")

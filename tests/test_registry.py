import pytest

from staticgen import UnknownNameError
from staticgen.registry import Registry


class Thing:
    pass


class Other:
    pass


def make():
    return Registry("layout", {"plain": Thing, "lazy": "collections:OrderedDict"})


@pytest.mark.parametrize("name", ["plain", "PLAIN", " Plain "])
def test_names_are_found_in_any_letter_case(name):
    assert make().get(name) is Thing


def test_a_string_entry_is_imported_on_first_use():
    from collections import OrderedDict

    assert make().get("lazy") is OrderedDict


@pytest.mark.parametrize("name", ["rign", "", None, 3])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(UnknownNameError, match=r"unknown layout .*expected one of plain, lazy"):
        make().get(name)


def test_a_registered_class_is_found_and_a_taken_name_is_refused():
    registry = make()
    registry.register("Mine", Thing)
    assert registry.get("mine") is Thing
    registry.register("mine", Thing)  # the same again changes nothing
    with pytest.raises(ValueError, match="'mine' is already taken"):
        registry.register("mine", Other)
    with pytest.raises(ValueError, match="non-empty string"):
        registry.register(" ", Thing)

"""`spmdtrain.config` has every class of settings and every error that a caller may name."""

from collections.abc import Iterator

import pytest

import spmdtrain.config
from spmdtrain.config import Settings, UserError


def below(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from below(each)


@pytest.mark.parametrize("kind", [Settings, UserError])
def test_the_room_exports_every_class_that_it_has(kind):
    ours = {each for each in below(kind) if each.__module__.startswith("spmdtrain.config.")}
    names = {each.__name__ for each in ours}
    assert names - set(spmdtrain.config.__all__) == set()
    assert {getattr(spmdtrain.config, name) for name in names} == ours

"""Every public name can be had from `weft`, and only when it is asked for."""

from __future__ import annotations

import importlib
import sys

import pytest

import weft


@pytest.mark.parametrize("name", weft.__all__)
def test_name_is_there(name: str) -> None:
    assert getattr(weft, name) is getattr(importlib.import_module(weft._MODULE_OF[name]), name)
    assert name in dir(weft)


def test_every_error_is_public() -> None:
    errors = {
        name
        for name, value in vars(weft.errors).items()
        if isinstance(value, type) and value.__module__ == "weft.errors"
    }
    assert errors <= set(weft.__all__)


def test_the_package_is_its_own_namespace() -> None:
    from weft import weft as namespace

    assert namespace is sys.modules["weft"]


def test_modules_are_reached_as_attributes() -> None:
    assert weft.project is sys.modules["weft.project"]
    assert weft.settings is sys.modules["weft.settings"]
    assert weft.config.connect is weft.connect
    assert weft.patterns.streams.Consumer is weft.Consumer
    assert weft.patterns.streams.GroupConsumer is weft.GroupConsumer


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = weft.nope  # type: ignore[attr-defined]

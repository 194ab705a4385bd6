"""Callbacks that are called with values of the annotated types only.

A page of the dashboard sends what its components hold. Another program can send anything to the
same address: that is the request's fault, and gets status 400 with one line.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, Union

import dash
from werkzeug.exceptions import BadRequest, InternalServerError

from ddltrace.dashboard.errors import print_error

Shape = TypeVar("Shape")

_NOT_OF_A_PAGE: Final = "no page of this dashboard sends such a request"
_INT64: Final = 1 << 63


class CheckedDash(dash.Dash):
    """A Dash app whose callbacks check the values that they are called with."""

    def callback(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """As `dash.Dash.callback`, for functions whose parameters are annotated."""
        register = super().callback(*args, **kwargs)
        return lambda function: register(_checked(function))


def triggered(shape: type[Shape]) -> Shape | None:
    """The id of the component that triggered a callback; None if it has another form of id.

    Args:
        shape: A `TypedDict` of the id's keys.

    Raises:
        BadRequest: The id has the form of no component.
    """
    found = _triggered_id()
    if found is None or isinstance(found, str):
        return None
    if not matches(found, shape):
        raise BadRequest(_NOT_OF_A_PAGE)
    return typing.cast("Shape", dict(found))


def was_triggered_by(name: str) -> bool:
    """Whether the component of an id triggered a callback.

    Raises:
        BadRequest: The id has the form of no component.
    """
    return bool(_triggered_id() == name)


def _triggered_id() -> Any:
    try:
        return dash.ctx.triggered_id
    except Exception as error:  # the text of the id is the request's
        raise BadRequest(_NOT_OF_A_PAGE) from error


def matches(value: object, hint: Any) -> bool:
    """Whether a value that was read from JSON is of an annotated type.

    Integers are limited to 64 bits, and texts to what can be written as UTF-8.

    Args:
        hint: A type, a union, a list or dict with types of its items, a `TypedDict`, or Any.
    """
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        fits = any(matches(value, one) for one in of)
    elif origin is list:
        fits = isinstance(value, list) and all(matches(item, of[0]) for item in value)
    elif origin is dict:
        fits = isinstance(value, Mapping) and all(
            matches(key, of[0]) and matches(item, of[1]) for key, item in value.items()
        )
    elif typing.is_typeddict(hint):
        fits = isinstance(value, Mapping) and all(
            key in value and matches(value[key], kind)
            for key, kind in typing.get_type_hints(hint).items()
        )
    elif hint is int:
        fits = type(value) is int and -_INT64 <= value < _INT64
    elif hint is str:
        fits = isinstance(value, str) and _is_text(value)
    else:
        fits = hint is Any or isinstance(value, hint)
    return fits


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False
    return True


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    hints = typing.get_type_hints(function)
    wanted = [hints[name] for name in inspect.signature(function).parameters]

    @functools.wraps(function)
    def call(*values: Any) -> Any:
        if len(values) != len(wanted) or not all(map(matches, values, wanted)):
            raise BadRequest(_NOT_OF_A_PAGE)
        try:
            return function(*values)
        except (BadRequest, dash.exceptions.PreventUpdate):
            raise
        except Exception as error:
            print_error()
            raise InternalServerError(f"an error in ddltrace, {type(error).__name__}") from error

    return call

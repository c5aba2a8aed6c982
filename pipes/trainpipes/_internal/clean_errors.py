"""Errors of other packages as they are passed on: with their kind and traceback, without secrets."""

from __future__ import annotations

from typing import Any

from trainpipes.errors import TrainpipesError
from trainpipes.errors.secrets import hidden
from trainpipes.errors.text import cut

#: Values of an error that hold no text.
_PLAIN = (int, float, bytes, type(None))
#: Characters kept of the text of another package's error: some print whole answers of servers.
MOST = 1000


class OriginalError(Exception):
    """The class name and the text of an error of another package."""


def clean(error: BaseException) -> Any:
    """What stands for an error, and for all that led to it: raise this, or name it as the cause.

    >>> clean(KeyError("https://host/a?sig=abc"))
    KeyError('https://host/a?sig=…')
    """
    return _clean(error, {})


def _clean(error: BaseException, known: dict[int, BaseException]) -> BaseException:
    if id(error) in known:
        return known[id(error)]
    found = error if isinstance(error, TrainpipesError) else _stand_in(error)
    known[id(error)] = found
    cause, context, silent = error.__cause__, error.__context__, error.__suppress_context__
    found.__cause__ = None if cause is None else _clean(cause, known)
    found.__context__ = None if context is None else _clean(context, known)
    found.__suppress_context__ = silent
    if found is not error:
        found.__traceback__ = error.__traceback__
    notes = getattr(error, "__notes__", None)
    if notes:
        found.__notes__ = [hidden(str(note)) for note in notes]
    return found


def _stand_in(error: BaseException) -> BaseException:
    """An error of the first of its kinds that Python has itself, or else ``OriginalError``."""
    kind: Any = next(one for one in type(error).__mro__ if one.__module__ == "builtins")
    given: list[Any] = [_named(error)]
    if kind is type(error):
        given = [one if isinstance(one, _PLAIN) else hidden(str(one)) for one in error.args]
    elif kind in (Exception, BaseException):
        kind = OriginalError
    try:
        found: BaseException = kind(*given)
    except Exception:
        return OriginalError(_named(error))
    if isinstance(error, OSError) and isinstance(found, OSError):
        found.errno = error.errno
        if kind is type(error) and error.filename is not None:
            found.filename = hidden(str(error.filename))
    return found


def _named(error: BaseException) -> str:
    text = cut(hidden(str(error)), MOST)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

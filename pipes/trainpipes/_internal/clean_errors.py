"""Errors of other packages as they are passed on: with their kind and traceback, without secrets."""

from __future__ import annotations

from typing import Any, TypeVar

from trainpipes.errors import TrainpipesError
from trainpipes.errors.secrets import hidden
from trainpipes.errors.text import cut

E = TypeVar("E", bound=BaseException)

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
    found = error if isinstance(error, TrainpipesError) else _stand_in(error, known)
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


def _stand_in(error: BaseException, known: dict[int, BaseException]) -> BaseException:
    if isinstance(error, BaseExceptionGroup):
        inner = [_clean(one, known) for one in error.exceptions]
        return BaseExceptionGroup(hidden(error.message), inner)
    kind = type(error)
    if kind.__module__ == "builtins":
        if isinstance(error, OSError) and error.errno is not None:
            names = [n if n is None else hidden(str(n)) for n in (error.filename, error.filename2)]
            return kind(error.errno, hidden(str(error.strerror)), names[0], None, names[1])
        given = [one if isinstance(one, _PLAIN) else hidden(str(one)) for one in error.args]
        return _made(kind, given) or OriginalError(_named(error))
    for base in kind.__mro__:
        if base.__module__ == "builtins" and base not in (Exception, BaseException, object):
            found = _made(base, [_named(error)])
            if found is not None:
                if isinstance(found, OSError) and isinstance(error, OSError):
                    found.errno = error.errno
                return found
    return OriginalError(_named(error))


def _made(kind: Any, given: list[Any]) -> BaseException | None:
    try:
        found = kind(*given)
    except Exception:
        return None
    return found if isinstance(found, BaseException) else None


def _named(error: BaseException) -> str:
    text = cut(hidden(str(error)), MOST)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

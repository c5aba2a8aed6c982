"""What is said where worker processes die, or cannot begin."""

from __future__ import annotations

import signal

from trainpipes.errors import ConfigError, TrainpipesError, WorkerError

__all__ = ["death", "ending", "function_refused", "let_go", "no_more", "rows_refused", "unready"]


def ending(process: int, code: int | None) -> str:
    """How a process ended, in words."""
    if code is None or code >= 0:
        return f"worker process {process} has ended with exit code {code}"
    name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else "unknown"
    hint = ", as the system does where memory runs out," if name == "SIGKILL" else ""
    return f"worker process {process} was ended by signal {-code} ({name}){hint}"


def death(said: str, how: str) -> WorkerError:
    """A worker died at a row."""
    return WorkerError(
        f"{said}: {how} while the function was called for a row; num_workers=0 shows what it does there",
        stage=said,
    )


def no_more(said: str, how: str) -> TrainpipesError:
    """The last worker died before it came to some rows."""
    return _of_no_row(WorkerError(f"{said}: {how}, and rows waited for it", stage=said))


def let_go(said: str) -> TrainpipesError:
    """Workers ended while rows waited."""
    return _of_no_row(WorkerError(f"{said}: its workers were let go", stage=said))


def unready(said: str, how: str, unfit: str | None) -> TrainpipesError:
    """A worker ended before it could begin; ``unfit`` is what it said of the function."""
    if unfit is not None:
        return _of_no_row(
            ConfigError(
                f"{said}: the function does not load in a worker process ({unfit}); define it at the top of "
                'a module that can be imported there, or use method="thread"',
                stage=said,
            )
        )
    return _of_no_row(
        WorkerError(
            f"{said}: {how} before it was ready; a program that is a script runs its pipeline below "
            '`if __name__ == "__main__":`, since workers import the script',
            stage=said,
        )
    )


def function_refused(said: str, error: Exception) -> ConfigError:
    """The function does not pickle."""
    return ConfigError(
        f"{said}: the function must pickle to reach a worker process, and does not ({error}); define it at "
        'the top of a module, or use method="thread"',
        stage=said,
    )


def rows_refused(said: str, row: object, error: Exception) -> ConfigError:
    """Rows do not pickle."""
    return ConfigError(
        f"{said}: rows must pickle to reach a worker process, and a {type(row).__name__} does not ({error}); "
        'use method="thread"',
        stage=said,
    )


def _of_no_row(error: TrainpipesError) -> TrainpipesError:
    """An error that is not about the row for which it comes up."""
    error._trainpipes = error.stage, None  # type: ignore[attr-defined]
    return error

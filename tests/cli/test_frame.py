"""What all commands share: help, errors, exit codes, streams, signals."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import click
import pytest

import trainpipes as tp
from cli.command import START, environment, trainpipes
from trainpipes.cli import app, console
from trainpipes.cli.app import COMMANDS, Command, command_line, run

HEAVY = ("torch", "numpy", "pyarrow", "pandas", "rich", "yaml")
SAY_HEAVY = (
    "import atexit, sys; atexit.register(lambda: print('heavy', sorted("
    f"{{m.split('.')[0] for m in sys.modules}} & {set(HEAVY)!r}), file=sys.stderr))"
)


@pytest.fixture
def failing(monkeypatch):
    """A command ``fail`` that raises what it is given."""
    raised: list[BaseException] = []

    @click.command("fail", cls=Command)
    def fail():
        """Fail."""
        raise raised[0]

    monkeypatch.setitem(COMMANDS, "fail", "Fail.")
    monkeypatch.setitem(sys.modules, "trainpipes.cli.fail", type("m", (), {"command": fail}))
    return raised


def fails_with(failing, error, capsys, *options):
    failing[:] = [error]
    code = run([*options, "fail"])
    said = capsys.readouterr()
    assert said.out == ""
    return code, said.err


# Help and what it costs


def test_help_lists_every_command_and_imports_nothing_heavy():
    told = trainpipes("--help", before=SAY_HEAVY)
    assert told.returncode == 0
    places = [told.stdout.index(f"\n  {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert told.stderr == "heavy []\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_imports_nothing_heavy(name):
    told = trainpipes(name, "--help", before=SAY_HEAVY)
    assert told.returncode == 0
    assert told.stderr == "heavy []\n"
    assert "--debug" in told.stdout
    assert "Example" in told.stdout
    assert max(map(len, told.stdout.splitlines())) <= 100


@pytest.mark.parametrize("name", COMMANDS)
def test_what_help_says_of_a_command_is_short(name):
    assert len(COMMANDS[name]) < 70
    assert COMMANDS[name].endswith(".")


def test_no_command_is_help_and_a_wrong_command_line():
    told = trainpipes()
    assert (told.returncode, told.stdout) == (2, "")
    assert "recipes" in told.stderr


def test_the_version_is_told_at_once():
    told = trainpipes("--version", before=SAY_HEAVY)
    assert told.stdout == f"trainpipes {tp.__version__}\n"
    assert told.stderr == "heavy []\n"


@pytest.mark.parametrize("module", ["trainpipes", "trainpipes.cli"])
def test_python_dash_m_is_the_command(module):
    command = [sys.executable, "-m", module, "--version"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert told.stdout == f"trainpipes {tp.__version__}\n"
    assert told.returncode == 0


# A wrong command line


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rcipes", "error: no command 'rcipes' (did you mean 'recipes'?)"),
        ("xyzzy", "error: no command 'xyzzy'; there are recipes, inspect"),
        ("recipes shwo sft", "error: no command 'shwo' (did you mean 'show'?)"),
        ("recipes --jsn", "--json"),
        ("--hlep", "--help"),
    ],
)
def test_a_near_name_is_told(line, said, capsys):
    assert run(line.split()) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert re.search(r"^Try 'trainpipes.* --help' for help\.$", told.err, re.MULTILINE)
    assert told.out == ""


# Errors


def test_an_error_of_the_library_is_its_sentence(failing, capsys):
    error = tp.ConfigError("batch_size is 1 or more, got 0: give another")
    assert fails_with(failing, error, capsys) == (1, f"error: {error}\n")


def test_an_error_of_several_lines_keeps_them(failing, capsys):
    error = tp.ConfigError("write it so:\n\n    class Mine(RowStage):\n")
    _, said = fails_with(failing, error, capsys)
    assert said.rstrip() == "error: write it so:\n\n    class Mine(RowStage):"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "x y"), "x y: No such file or directory"),
        (OSError(18, "Invalid cross-device link", "a", None, "b"), "a -> b: Invalid cross-device link"),
        (OSError("gone"), "OSError: gone (--debug shows where)"),
        (KeyError("x"), "KeyError: 'x' (--debug shows where)"),
        (AssertionError(), "AssertionError (--debug shows where)"),
        (EOFError("cut short"), "EOFError: cut short (--debug shows where)"),
        (RecursionError("too deep"), "RecursionError: too deep (--debug shows where)"),
        (
            MemoryError("Unable to allocate 8 GiB"),
            "out of memory (Unable to allocate 8 GiB): give the process more, or work on less at a time",
        ),
        (MemoryError(), "out of memory: give the process more, or work on less at a time"),
        (
            ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"),
            "the package torch is needed and not installed: pip install torch",
        ),
    ],
)  # fmt: skip
def test_other_errors_are_one_sentence_too(failing, error, said, capsys):
    assert fails_with(failing, error, capsys) == (1, f"error: {said}\n")


def test_a_panic_of_another_language_is_an_error(failing, capsys):
    class PanicException(BaseException):
        pass

    code, said = fails_with(failing, PanicException("index out of bounds"), capsys)
    assert (code, said) == (1, "error: PanicException: index out of bounds (--debug shows where)\n")


def test_an_endless_message_is_cut(failing, capsys):
    code, said = fails_with(failing, ValueError("x" * 10_000_000), capsys)
    assert code == 1
    assert len(said) < 3000


def test_a_message_cannot_change_the_terminal_nor_be_markup(failing, capsys):
    error = tp.DataError("a[bold]b[/bold]\x1b[2Jc\rd\x07: :smile: é")
    _, said = fails_with(failing, error, capsys)
    assert said == "error: a[bold]b[/bold]\\x1b[2Jc\\x0dd\\x07: :smile: é\n"


@pytest.mark.parametrize("line", ["--debug fail", "fail --debug"])
def test_debug_shows_the_traceback(failing, line, capsys):
    failing[:] = [tp.ConfigError("no")]
    assert run(line.split()) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.rstrip().endswith("ConfigError: no")


def test_debug_by_the_environment(failing, capsys, monkeypatch):
    for value, shown in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("TRAINPIPES_DEBUG", value)
        _, said = fails_with(failing, tp.ConfigError("no"), capsys)
        assert ("Traceback" in said) is shown


def test_debug_is_forgotten_by_the_next_run(failing, capsys):
    fails_with(failing, tp.ConfigError("no"), capsys, "--debug")
    _, said = fails_with(failing, tp.ConfigError("no"), capsys)
    assert said == "error: no\n"


def test_errors_stay_text_with_json(capsys):
    assert run(["recipes", "show", "nothing-like-it", "--json"]) != 0
    told = capsys.readouterr()
    assert told.out == ""
    assert "error: " in told.err


@pytest.mark.parametrize("code", [3, 0])
def test_a_command_may_end_with_a_code_of_its_own(failing, code, capsys):
    assert fails_with(failing, click.exceptions.Exit(code), capsys) == (code, "")


def test_warnings_are_one_line_each(monkeypatch, capsys):
    def warns():
        warnings.warn("two\n  lines", UserWarning, stacklevel=1)

    monkeypatch.setattr(app, "_run", lambda _: warns() or 0)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        before = warnings.showwarning
        assert run([]) == 0
        assert warnings.showwarning is before
    assert capsys.readouterr().err == "warning: two lines\n"


@pytest.mark.parametrize("hidden", ["click", "rich", "yaml", "torch"])
def test_a_missing_package_is_one_line_that_installs_it(hidden):
    hide = (
        "import importlib.util, sys\n"
        "class Hide:\n"
        f"    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == {hidden!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda n, p=None: None if n == {hidden!r} else found(n, p)\n"
    )
    told = trainpipes("recipes", before=hide)
    assert (told.returncode, told.stdout) == (1, "")
    (line,) = told.stderr.splitlines()
    pip = {"yaml": "pyyaml"}.get(hidden, hidden)
    assert line.startswith("error: ")
    assert line.endswith(f"not installed: pip install {pip}")


# Streams


def test_who_reads_no_further_is_no_error():
    shell = f"{sys.executable} -c '{START}' --help | head -c 10"
    told = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shell}"], capture_output=True, text=True, timeout=60
    )
    assert told.stdout == "Usage: tra"
    assert told.stderr == ""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed, tmp_path):
    line = f"{sys.executable} -c '{START}' --version {closed}"
    told = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stderr) == (0, "")


def test_what_is_opened_does_not_get_what_is_printed_to_a_closed_stream(tmp_path):
    code = "import trainpipes.cli as c; c._open_what_is_closed(); f = open('mine', 'w'); print(1)"
    line = f'{sys.executable} -c "{code}; f.write(chr(107))" >&-'
    subprocess.run(["bash", "-c", line], check=True, cwd=tmp_path, timeout=60)
    assert (tmp_path / "mine").read_text() == "k"


def test_a_full_disk_is_an_error():
    with Path("/dev/full").open("w") as full:
        told = trainpipes("--help", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert told.returncode == 1
    assert told.stderr == "error: No space left on device\n"


def test_characters_that_stdout_lacks_are_spelt_out():
    code = "from trainpipes.cli.console import out, print_json, note; spell(); {}"
    setup = "from trainpipes.cli.console import spell_out_what_cannot_be_encoded as spell\n"
    for encoding, call, shown in (
        ("ascii", "out().print('é → \\udc80')", "\\xe9 \\u2192 \\udc80\n"),
        ("utf-8", "out().print('é → \\udc80')", "é → \\udc80\n"),
        ("ascii", "print_json('é')", '"\\u00e9"\n'),
        ("latin-1", "print_json('→é')", '"\\u2192\\u00e9"\n'),
        ("utf-8", "print_json('é')", '"é"\n'),
        ("utf-8", "print_json('\\udc80')", '"\\udc80"\n'),
    ):
        told = subprocess.run(
            [sys.executable, "-c", setup + code.format(call)],
            capture_output=True,
            encoding="utf-8",
            env=environment({"PYTHONIOENCODING": encoding}),
            timeout=60,
        )
        assert told.stdout == shown, told.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_stdout_of_few_characters_is_no_error(encoding):
    told = trainpipes("recipes", env={"PYTHONIOENCODING": encoding})
    assert told.returncode == 0, told.stderr
    assert "sft" in told.stdout


def on_terminal(arguments: list[str], env: dict[str, str], columns: int = 80) -> tuple[int, str]:
    """What the command writes to a terminal, and how it ends."""
    import fcntl
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", START, *arguments],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment({"TERM": "xterm-256color", **env}),
    )
    os.close(follower)
    text = b""
    while select.select([leader], [], [], 60)[0]:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        text += part
    os.close(leader)
    return process.wait(60), text.decode().replace("\r\n", "\n")


def test_colours_are_for_terminals_that_want_them():
    wrong = ["recipes", "show", "nothing-like-it"]
    for env, coloured in (
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ):
        code, text = on_terminal(wrong, env)
        assert code == 1
        assert ("\x1b[" in text) is coloured, env


@pytest.mark.parametrize(
    ("env", "coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "0"}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_pipes_get_colours_where_they_are_forced(env, coloured, monkeypatch, capsys):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    console.forget_consoles()
    console.error_line("no")
    assert ("\x1b[" in capsys.readouterr().err) is coloured
    assert not console.err().is_terminal
    console.forget_consoles()


def test_a_narrow_terminal_gets_narrow_help():
    code, text = on_terminal(["--help"], {}, columns=40)
    assert code == 0
    assert max(map(len, text.splitlines())) <= 46  # the usage line has 44


# Signals


def stopped(number: signal.Signals, after: float, arguments=("recipes",)) -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", START, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    time.sleep(after)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "error: stopped\n"),
        (signal.SIGTERM, 143, ""),
        (signal.SIGHUP, 129, ""),
    ],
)
def test_a_signal_stops_it_also_while_torch_is_imported(number, code, said):
    for after in (0.4, 0.8, 1.2):
        found, told = stopped(number, after)
        if found == 0:  # a fast machine: it was done already
            break
        if found == -number:  # a slow one: Python had not started yet
            continue
        assert (found, told) == (code, said), after


def test_a_signal_that_an_import_drops_comes_again():
    # What happens to it in a callback of a weak reference, as importlib has one for each module.
    drops = (
        "import sys, weakref, signal, time\n"
        "import trainpipes.cli.app as app\n"
        "class Held: pass\n"
        "def work(_):\n"
        "    held = Held()\n"
        "    reference = weakref.ref(held, lambda _: signal.raise_signal(signal.{}))\n"
        "    del held\n"
        "    time.sleep(20)\n"
        "    print('it went on')\n"
        "app.command_line.invoke = work\n"
    )
    for name, code, said in (("SIGINT", 130, "error: stopped\n"), ("SIGTERM", 143, "")):
        told = trainpipes("recipes", before=drops.format(name))
        assert (told.returncode, told.stderr, told.stdout) == (code, said, "")


def test_signal_handlers_are_given_back():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run(["--version"])
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_what_nohup_ignores_stays_ignored():
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    send = (
        "import trainpipes.cli.app as app\n"
        "app.command_line.invoke = lambda _: (signal.raise_signal(signal.SIGHUP), print('on'))[1]"
    )
    told = trainpipes("recipes", before=f"{ignore}\n{send}")
    assert (told.returncode, told.stdout) == (0, "on\n")


def test_every_command_has_a_line_of_its_own():
    assert list(command_line.list_commands(None)) == list(COMMANDS)  # type: ignore[arg-type]

"""What all commands share: help, errors, exit codes, streams, Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from pathlib import Path

import click
import pytest

import trainpipes as tp
from command import START, environment, trainpipes
from interrupts import is_interrupted, places_of
from trainpipes import cli
from trainpipes.cli import shared
from trainpipes.cli.app import command_line

HEAVY = ("torch", "numpy", "pyarrow", "pandas", "yaml")
NAMES = ["recipes", "inspect", "run", "repack", "tokenize", "state", "locate", "find"]


@pytest.fixture
def fails(monkeypatch, ran):
    """Runs a command that does something, and gives exit code and stderr."""

    def running(work, *options):
        command = click.Command("fail", callback=work)
        monkeypatch.setitem(command_line.commands, "fail", command)
        code, out, err = ran(*options, "fail")
        assert out == ""
        return code, err

    return running


def raising(error):
    def work():
        raise error

    return work


# Help and what it costs


def test_help_of_every_command_imports_nothing_heavy_and_has_an_example():
    code = (
        "import sys\nfrom trainpipes.cli.app import run\n"
        f"for line in [['--help'], ['--version'], *([name, '-h'] for name in {NAMES})]:\n"
        "    assert run(line) == 0\n"
        f"print(sorted({{m.split('.')[0] for m in sys.modules}} & {set(HEAVY)}), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert done.stderr == "[]\n"
    overview, *each = done.stdout.split("Usage: ")[1:]
    places = [overview.index(f"\n  {name} ") for name in NAMES]
    assert places == sorted(places)
    assert f"trainpipes {tp.__version__}\n" in overview
    assert len(each) == len(NAMES)
    assert all("Example" in text for text in each)


def test_python_dash_m_is_the_command():
    told = subprocess.run(
        [sys.executable, "-m", "trainpipes"], capture_output=True, text=True, timeout=60
    )
    assert (told.returncode, told.stdout) == (2, "")  # no command is a wrong command line
    assert "recipes" in told.stderr


def test_a_shell_completes_commands_options_and_recipes(monkeypatch, ran):
    monkeypatch.setenv("_TRAINPIPES_COMPLETE", "bash_complete")
    for line, found in (
        ("trainpipes re", ["plain,recipes", "plain,repack"]),
        ("trainpipes recipes show se", ["plain,seq2seq"]),
        ("trainpipes run masked", ["plain,masked_lm"]),
        ("trainpipes state --js", ["plain,--json"]),
    ):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
        code, out, _ = ran()
        assert (code, out.splitlines()) == (0, found)
    monkeypatch.setenv("_TRAINPIPES_COMPLETE", "bash_source")
    assert "complete -o nosort" in ran()[1]


# Errors


@pytest.mark.parametrize(
    ("line", "said"),
    [("rcipes", "rcipes"), ("recipes --jsn", "--jsn"), ("--hlep", "--hlep"), ("inspect", "FILES")],
)
def test_a_wrong_command_line_is_exit_code_2(line, said, ran):
    code, out, err = ran(*line.split())
    assert (code, out) == (2, "")
    assert said in err
    assert "--help" in err


@pytest.mark.parametrize(("error", "said"), [
    (tp.ConfigError("batch_size must be 1 or more, got 0"), "batch_size must be 1 or more, got 0"),
    (tp.ConfigError("there is one: overwrite=True"), "there is one: overwrite=True (here: --overwrite)"),
    (FileNotFoundError(2, "No such file or directory", "x y"), "x y: No such file or directory"),
    (OSError(18, "Invalid cross-device link", "a", None, "b"), "a -> b: Invalid cross-device link"),
    (OSError("gone"), "OSError: gone (--debug shows where)"),
    (EOFError("cut short"), "EOFError: cut short (--debug shows where)"),
    (AssertionError(), "AssertionError (--debug shows where)"),
    (MemoryError("8 GiB"), "MemoryError: 8 GiB (--debug shows where)"),
    (ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"),
        "the package torch is needed and not installed: pip install torch"),
    (tp.DataError("a[bold]b[/bold]\x1b[2Jc\rd\x07: :smile: é"),
        "a[bold]b[/bold]\\x1b[2Jc\\rd\\x07: :smile: é"),
    (ValueError("x" * 9999), f"ValueError: {'x' * 2000}… (--debug shows where)"),
])  # fmt: skip
def test_an_error_is_one_line_without_a_traceback(fails, error, said):
    assert fails(raising(error)) == (1, f"error: {said}\n")


def test_a_panic_of_another_language_is_an_error_and_ctrl_c_a_line_and_130(fails):
    panic = type("PanicException", (BaseException,), {})
    assert fails(raising(panic("out of bounds")))[0] == 1
    assert fails(raising(KeyboardInterrupt())) == (130, "error: stopped\n")


def test_debug_shows_the_traceback(fails, monkeypatch):
    error = raising(tp.ConfigError("no"))
    _, said = fails(error, "--debug")
    assert "Traceback" in said
    assert said.rstrip().endswith("ConfigError: no")
    assert fails(error)[1] == "error: no\n"
    for value, shown in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("TRAINPIPES_DEBUG", value)
        assert ("Traceback" in fails(error)[1]) is shown


def test_warnings_are_one_line_each(fails):
    before = warnings.showwarning

    def warns():
        warnings.simplefilter("default")
        warnings.warn("two\n  lines", UserWarning, stacklevel=1)

    assert fails(warns) == (0, "warning: two lines\n")
    assert warnings.showwarning is before


def test_a_missing_package_is_one_line_that_installs_it():
    hide = (
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, p=None: None if n in ('click', 'yaml') else found(n, p)"
    )
    told = trainpipes("recipes", before=hide)
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr == "error: click, pyyaml not installed: pip install click pyyaml\n"


# Streams


def shell(line: str, **options) -> subprocess.CompletedProcess[str]:
    line = line.replace("TP", f"{sys.executable} -c '{START}'")
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True, timeout=60,
        env=environment(), **options,
    )  # fmt: skip


@pytest.mark.parametrize(("line", "out"), [
    ("TP run --help | head -c 10", "Usage: tra"), ("TP --version >&-", ""), ("TP --version <&- >&- 2>&-", ""),
])  # fmt: skip
def test_who_reads_no_further_is_no_error(line, out):
    told = shell(line)
    assert (told.stdout, told.stderr) == (out, "")
    assert told.returncode == 0 or "head" in line


def test_what_is_opened_does_not_get_what_is_printed_to_a_closed_stream(tmp_path):
    code = "import trainpipes.cli as c; c._open_what_is_closed(); f = open('mine', 'w'); print(1)"
    shell(f'{sys.executable} -c "{code}; f.write(chr(107))" >&-', cwd=tmp_path)
    assert (tmp_path / "mine").read_text() == "k"


def test_a_full_disk_is_an_error():
    with Path("/dev/full").open("w") as full:
        told = trainpipes("--help", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert told.returncode == 1
    assert "No space left on device\n" in told.stderr


def test_characters_that_stdout_lacks_are_spelt_out():
    code = "from trainpipes.cli.app import run; run(['fail'])\n"
    code += "from trainpipes.cli import shared as c; c.out('é → \\udc80'); c.print_json('é')"
    for encoding, shown in (
        ("ascii", '\\xe9 \\u2192 \\udc80\n"\\u00e9"\n'),
        ("utf-8", 'é → \\udc80\n"é"\n'),
    ):
        told = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=60,
            env=environment({"PYTHONIOENCODING": encoding}),
        )  # fmt: skip
        assert told.stdout == shown, told.stderr


def test_json_has_no_nan(capsys):
    shared.print_json({"a": [float("nan"), 1.5]})
    assert capsys.readouterr().out.split() == ["{", '"a":', "[", "null,", "1.5", "]", "}"]


def test_ctrl_c_while_modules_are_imported_is_one_line():
    code = (
        "import signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, *_):\n"
        "        return signal.raise_signal(2) if name == 'trainpipes.cli.app' else None\n"
        "sys.meta_path.insert(0, Finder)"
    )
    told = trainpipes("recipes", before=code)
    assert (told.returncode, told.stderr) == (128 + signal.SIGINT, "error: stopped\n")


def test_ctrl_c_at_any_place_of_the_command_is_one_line(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["trainpipes", "--version"])
    monkeypatch.setattr(
        signal, "signal", lambda *_: None
    )  # from there on it ends the process at once

    def run():
        with pytest.raises(SystemExit) as ended:
            cli.main()
        codes.append(ended.value.code)

    codes = []
    found = [place for place in places_of(run, ("cli/",)) if place[0].endswith("/cli/__init__.py")]
    assert len(found) > 8
    for place in found[:-2]:
        codes.clear()
        capfd.readouterr()
        assert is_interrupted(run, place, ("cli/",)), place
        said = capfd.readouterr().err
        assert (codes, said) in (([130], "error: stopped\n"), ([0], "")), place

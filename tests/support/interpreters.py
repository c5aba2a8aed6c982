"""New interpreters at once: a process that has imported torch and the library forks for each.

``subprocess.run([*python(), "-c", code])`` gives what ``subprocess.run([sys.executable, "-c", code])`` does,
2.5 s of processor time cheaper. It takes ``-c``, ``-m``, a script, and ``-W`` before them. Signals go to
``pid_of(run)``: ``run.pid`` only waits for it. Not for what is measured (memory, start-up, modules that are
imported). What is left when it ends is not taken down: modules and objects just go. All processes of
xdist share one.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir
from typing import Any
from uuid import uuid4
from zlib import crc32

__all__ = ["SHARED", "pid_of", "python"]

#: The name of a run of the tests, and the process that ends last. conftest.py sets those of xdist.
SHARED: list[Any] = [uuid4().hex, os.getpid()]
TEMPORARY = gettempdir()  # whatever a test says later

SERVER = r'''
import json, os, select, shutil, signal, socket, sys, warnings
if os.fork():
    os._exit(0)  # so that it is no child of the tests, which count theirs, and kill them
os.setsid()
import torch, torch._dynamo, torch.distributed  # the second one is what a first optimizer imports
import torchdata.nodes, torchdata.stateful_dataloader
import pyarrow.parquet, pyarrow.json, pyarrow.csv
import trainpipes.loader, trainpipes.pipeline.starts, trainpipes.testing
import importlib
from trainpipes.engine.processes import executors
for more in sys.argv[3:]:
    importlib.import_module(more)

def serve(address):
    """Return in a process of its own for each call."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(address + "~")
    server.listen()
    open(address + ".pid", "w").write(str(os.getpid()))
    os.rename(address + "~", address)
    tests = int(sys.argv[2])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([server], [], [], 5)
        try:
            os.kill(tests, 0)
        except ProcessLookupError:
            shutil.rmtree(os.path.dirname(address), ignore_errors=True)
            os._exit(0)
        if not ready:
            continue
        connection, _ = server.accept()
        if os.fork() == 0:
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            asked = json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))
            child = os.fork()
            if child == 0:
                connection.close()
                return streams, asked
            wait(connection, child)
        connection.close()

def wait(connection, child):
    """Tell the caller what the child is and how it ended, and end it where the caller is no more."""
    connection.sendall(b"%d\n" % child)
    ended = os.pidfd_open(child)
    gone = select.poll()
    gone.register(ended, select.POLLIN)
    gone.register(connection, select.POLLHUP)
    if ended not in [number for number, _ in gone.poll()]:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    try:
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    except OSError:
        pass
    os._exit(0)

streams, asked = serve(sys.argv[1])
os.setpgid(0, 0)
executors.HOME = os.getpid()  # which has a fork server of its own
for number, stream in enumerate(streams):
    os.dup2(stream, number)
os.closerange(3, 64)
sys.stdin = open(0, closefd=False)
sys.stdout = open(1, "w", closefd=False, buffering=1 if os.isatty(1) else -1)
sys.stderr = open(2, "w", closefd=False, buffering=1)
sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
os.chdir(asked["cwd"])
os.environ.clear()
os.environ.update(asked["env"])
words = asked["arguments"]
options = list(filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")))
warnings.resetwarnings()
import importlib, importlib.util, types
warnings.simplefilter("default")
for filtered in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
    warnings.simplefilter("ignore", filtered)
while words[0].startswith("-W"):
    options.append(words[0][2:] or words.pop(1))
    words.pop(0)
warnings._processoptions(options)
path = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
sys.path[:] = path + [one for one in sys.path if one not in path]
main = sys.modules["__main__"] = types.ModuleType("__main__")
main.__builtins__ = __builtins__
if words[0] == "-c":
    sys.argv = ["-c", *words[2:]]
    sys.path.insert(0, "")
    code = compile(words[1], "<string>", "exec")
elif words[0] == "-m":
    import runpy
    sys.argv = words[1:]
    sys.path.insert(0, os.getcwd())
    name, code = words[1], None
else:
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    main.__file__ = os.path.abspath(words[0])
    code = compile(open(words[0]).read(), words[0], "exec")
status, interrupted = 0, False
try:
    if code is None:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        exec(code, main.__dict__)
except SystemExit as ended:
    status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if not isinstance(ended.code, int | None):
        print(ended.code, file=sys.stderr)
except BaseException as error:
    status, interrupted = 1, isinstance(error, KeyboardInterrupt)
    error = error.with_traceback(error.__traceback__.tb_next)
    sys.excepthook(type(error), error, error.__traceback__)
import atexit, threading
threading._shutdown()
atexit._run_exitfuncs()
try:
    sys.stdout.flush()
    sys.stderr.flush()
except OSError:
    status = 120
if interrupted:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
os._exit(status & 255)
'''
CLIENT = r"""
import json, os, signal, socket, sys
asked = {"arguments": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ)}
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    socket.send_fds(server, [b" "], [0, 1, 2])
    server.sendall(json.dumps(asked).encode())
    server.shutdown(socket.SHUT_WR)
    said = server.makefile()
    link = f"{sys.argv[1]}.{os.getpid()}"
    if os.path.lexists(link):
        os.unlink(link)
    os.symlink(said.readline().strip(), link)
    code = int(said.readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@cache
def python(*modules: str) -> tuple[str, ...]:
    """The words of a command that stand for ``sys.executable``, with these modules imported, too."""
    run, tests = SHARED
    folder = Path(TEMPORARY, f"tp-forkserver-{run}-{crc32(repr(modules).encode()):08x}")
    server, client, address = (folder / name for name in ("forkserver.py", "client.py", "socket"))
    try:
        folder.mkdir()
    except FileExistsError:
        pass  # another process starts it
    else:
        server.write_text(SERVER)
        client.write_text(CLIENT)
        first = python() if modules else (sys.executable,)  # which has torch already
        command = [*first, "-W", "ignore", str(server), str(address), str(tests), *modules]
        null = subprocess.DEVNULL
        subprocess.run(command, stdin=null, stdout=null, stderr=null, check=True)
    end = time.monotonic() + 120
    while not address.exists():
        assert time.monotonic() < end, "the library cannot be imported"
        time.sleep(0.05)
    if tests == os.getpid():  # else the server looks whether they are over
        # No TemporaryDirectory: a process that multiprocessing forks lets go of what atexit holds, and that
        # would remove the folder (Python 3.13).
        atexit.register(rmtree, folder, ignore_errors=True)
        atexit.register(os.kill, int(Path(f"{address}.pid").read_text()), signal.SIGKILL)
    return (sys.executable, "-IS", str(client), str(address))


def pid_of(run: subprocess.Popen[Any]) -> int:
    """The process that a run of ``python()`` is about, and its group."""
    link = f"{run.args[3]}.{run.pid}"  # type: ignore[index]
    while not os.path.lexists(link):
        assert run.poll() is None
        time.sleep(0.002)
    return int(os.readlink(link))

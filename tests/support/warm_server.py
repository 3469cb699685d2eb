"""Server that runs Python programs in forked children of a process with slow modules imported.

``python warm_server.py DESCRIPTOR MODULE...`` imports the installed ones of these modules, and reads requests
from the socket. ``start`` has the words after ``python`` in a command, with ``cwd``, ``environ`` and three
descriptors for the program's streams; the answer is its process id. ``wait`` has a process id; the answer is
its exit code. Answers have the number of their request. Imports none of our modules: the programs would find
them imported.
"""

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import types
import warnings

PATHS = sys.path[1:]


def load(names):
    for name in names:
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)


def main(connection):
    while True:
        content, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not content:
            return
        request = json.loads(content)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                connection.close()
                end(run, request, streams)
            for stream in streams:
                os.close(stream)
        connection.sendall(json.dumps([request["number"], answer]).encode() + b"\n")


def run(request, streams):
    """Run a program as the interpreter does between its start and its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    first, *words = request["start"]
    python_path = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if first == "-c":
        sys.argv, sys.path[:] = ["-c", *words[1:]], ["", *python_path, *PATHS]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif first == "-m":
        sys.argv, sys.path[:] = words, [os.getcwd(), *python_path, *PATHS]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        folder = os.path.dirname(os.path.realpath(first))
        sys.argv, sys.path[:] = [first, *words], [folder, *python_path, *PATHS]
        runpy.run_path(first, run_name="__main__")


def end(function, *arguments):
    """Call the function, and end the process as the interpreter does."""
    code = 0
    try:
        function(*arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    import gc

    gc.disable()  # imports leave no garbage
    load(sys.argv[2:])
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # a normal exit makes Triton's library complain

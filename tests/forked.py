"""Ranks forked from one process that has torch: what `dtorch run -m MODULE` does, without the seconds of every start.

For tests of what ranks compute; those of starting and ending use the command itself.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(
    world: int, *module: str, cwd: Path = ROOT, timeout: float = 100, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `module[0]`, a module or a script, with the words after it in ranks; what they printed, and 0 or 1."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        given = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
        request = {"world": world, "module": module, "cwd": str(cwd), "environ": given}
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps({**request, "out": str(out), "err": str(err)}), file=server.stdin, flush=True)
        if not select.select([server.stdout], [], [], timeout)[0]:
            _end(server)
            raise subprocess.TimeoutExpired(module, timeout, out.read_text(), err.read_text())
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(module, code, out.read_text(), err.read_text())


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.forked"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server: subprocess.Popen[str] = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True, **pipes)  # type: ignore[call-overload]
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """End the server, and what it runs."""
    _server.cache_clear()
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def serve() -> None:
    """Answer requests, one after the other, each in a process of its own."""
    import distributedtorch  # noqa: F401 (so that those forked have it)

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            os._exit(_carry_out(request))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _carry_out(request: dict[str, object]) -> int:
    import distributedtorch as dt
    from tests import hosts

    os.environ.clear()
    os.environ.update(request["environ"])  # type: ignore[call-overload]
    os.chdir(str(request["cwd"]))
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(str(request[name]), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), number)
    module = list(request["module"])  # type: ignore[call-overload]
    if module[0] == "tests.hosts":
        hosts.pretend(module[1])  # the ranks have joined when their function is called
    code = 0
    try:
        dt.launch(_rank, module, workers=int(str(request["world"])))
    except dt.DistributedTorchError as error:
        print(error, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _rank(module: list[str]) -> None:
    import runpy

    sys.argv = list(module)
    if module[0].endswith(".py"):
        sys.path.insert(0, str(Path(module[0]).parent))
        runpy.run_path(module[0], run_name="__main__")
    else:
        runpy.run_module(module[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()

"""What is refused before anything starts, and the command that starts itself again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from distributedtorch.cli import main
from distributedtorch.core.errors import LaunchError
from distributedtorch.launch import script, supervise

JOB = Path(__file__).with_name("job.py")

RESTART = """
import atexit, json, os, sys, threading, time
from pathlib import Path
from distributedtorch.launch import join, place, record, supervise

def seen(pid):
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = [os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()]
    return {"pid": pid, "MiB": int(lines["VmRSS"].split()[0]) >> 10, "files": files}

here = place.find()
if here.launcher == "none":
    ballast = b"x" * (200 << 20)
    inherited = os.open("inherited", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(inherited, True)
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    atexit.register(Path("at_exit").touch)
    Path("before").write_text(json.dumps(seen(os.getpid())))
    sys.stdout.write("not flushed ")
    os.chdir("/")
    supervise.restart(2)
    print("never here")
join.join(here, device_type="cpu")
if here.rank == 0:
    Path("after").write_text(json.dumps(seen(os.getppid())))
if "forever" in sys.argv:
    print("running", flush=True)
    time.sleep(600)
print("rank", here.rank, sys.argv[1:], flush=True)
sys.exit(int(sys.argv[1]) if here.rank == 1 else 0)
"""


def test_a_port_in_use_is_refused_with_its_owner(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["run", "--workers", "2", "--port", str(port), str(JOB), "none", "0"]) == 2
    said = capsys.readouterr().err
    assert f"port {port} is in use by process {os.getpid()}" in said
    assert "do: " in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0", str(JOB)], "0 workers given"),
        (["--workers", "2", "absent.py"], "no script at absent.py"),
        (["--workers", "2", "--port", "70000", str(JOB)], "port 70000"),
        (["--workers", "2", "--plan", "no-such-word", str(JOB)], "no-such-word"),
    ],
)
def test_a_mistake_is_a_message_and_code_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import torch\n", "never calls dt.distribute"),
        ("from transformers import AutoModel, Trainer\n", "transformers' Trainer starts its own DDP"),
        ("import pytorch_lightning as pl\nimport torch", "Lightning starts its own DDP"),
    ],
)
def test_a_script_that_cannot_take_part_is_refused(source, words, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(source)
    if "lightning" in source:
        (tmp_path / "site-packages").mkdir()
        (tmp_path / "site-packages" / "pytorch_lightning.py").touch()
        sys.path.append(str(tmp_path / "site-packages"))
    try:
        with pytest.raises(LaunchError, match=words):
            script.check(str(path), 2)
    finally:
        sys.path[:] = [entry for entry in sys.path if not entry.startswith(str(tmp_path))]


@pytest.mark.parametrize(
    "source", ["import distributedtorch as dt\n", "import helper\n", "from . import x\n", "x = (\n"]
)
def test_a_script_that_may_take_part_is_let_through(source, tmp_path):
    (tmp_path / "helper.py").write_text("import distributedtorch\n")
    (tmp_path / "train.py").write_text(source)
    script.check(str(tmp_path / "train.py"), 2)


def test_a_script_whose_own_modules_do_not_take_part_is_refused(tmp_path):
    (tmp_path / "helper.py").write_text("import torch\n")
    (tmp_path / "train.py").write_text("import helper\n")
    with pytest.raises(LaunchError, match="never calls"):
        script.check(str(tmp_path / "train.py"), 2)


@pytest.mark.parametrize("code", [0, 7])
def test_a_plain_command_starts_itself_again(start, tmp_path, code):
    (tmp_path / "train.py").write_text(RESTART)
    run = start("train.py", code, "--flag")
    assert run.end() == code, run.err
    assert run.out == f"not flushed rank 0 ['{code}', '--flag']\n"
    assert run.gone_within(0.5)
    before, after = (json.loads((tmp_path / name).read_text()) for name in ("before", "after"))
    assert (tmp_path / "at_exit").exists()
    assert before["pid"] == after["pid"] == run.process.pid
    assert after["MiB"] < before["MiB"] - 200, "the starter keeps what its script had"
    assert str(tmp_path / "inherited") in before["files"] and str(tmp_path / "inherited") not in after["files"]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_what_the_starter_has_become_ends_the_run(start, tmp_path, number):
    (tmp_path / "train.py").write_text(RESTART)
    run = start("train.py", 0, "forever")
    run.until_running()
    os.kill(run.process.pid, number)
    assert run.end() == 128 + number
    assert f"dtorch: ended by {number.name}" in run.err and run.gone_within(0.5)


def test_what_cannot_be_repeated_is_refused_by_the_script_itself(monkeypatch):
    """The starter is still itself then: the error has a line of the script."""
    monkeypatch.setenv("DISTRIBUTEDTORCH_HANG", "soon")
    monkeypatch.setattr(supervise, "_refuse_unrepeatable", lambda _: None)
    with pytest.raises(LaunchError, match="a hang of 'soon'"):
        supervise.restart(2)


def test_a_script_from_stdin_cannot_be_repeated(tmp_path):
    command = [sys.executable, "-"]
    done = subprocess.run(command, input=RESTART, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "dt.launch(function, workers=2)" in done.stderr
    assert not (tmp_path / ".dtorch").exists()


def test_several_processes_are_refused_off_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(LaunchError, match="Linux for several processes"):
        supervise.restart(2)

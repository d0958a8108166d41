"""Checkpoints in an S3 store: `pip install "moto[server]" s3fs`, then `python benchmarks/stores.py [--kills 6]`.

moto's server speaks S3 over HTTP on loopback. A job that saves there is killed at random moments and goes on, at 2, 3
and 1 ranks; the end is compared to an undisturbed run on a disk, and every checkpoint that is left is read and checked.
Writes benchmarks/results/stores.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.resume import EPOCHS, finished, kill, start  # noqa: E402
from benchmarks.step_time import machine  # noqa: E402

BUCKET = "s3://checkpoints-of-a-test"


def serve() -> subprocess.Popen[bytes]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1"}
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as knock:
            if knock.connect_ex(("127.0.0.1", port)) == 0:
                return server
        time.sleep(0.1)
    raise RuntimeError("moto's server does not answer")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=6)
    given = parser.parse_args()
    draw, server = random.Random(0), serve()
    try:
        import s3fs

        from distributedtorch.checkpoint import index, place

        s3fs.S3FileSystem().mkdir(BUCKET.removeprefix("s3://"))
        rows = []
        with tempfile.TemporaryDirectory() as name:
            truth, _ = finished(Path(name), 2, "zero2", 0.3)
        os.environ["CHECKPOINTS"] = f"{BUCKET}/same"
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for _ in range(given.kills):
                kill(start(folder, 2, "zero2", 0.3), folder, 2, draw, draw.randrange(1, 14))
                there = place.of(f"{BUCKET}/same")
                whole = [folder for folder in there.committed() if index.INDEX in there.files(folder)]
                for one in whole:
                    index.Reader(there, one, index.read(there, one)).check(0, 1)
                rows.append({"checkpoints": len(whole), "names": whole})
                print(rows[-1], flush=True)
            end, _ = finished(folder, 2, "zero2", 0.3)
        same = end == truth
        os.environ["CHECKPOINTS"] = f"{BUCKET}/moving"
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            kill(start(folder, 2, "zero3", 0.0), folder, 2, draw, 10)
            kill(start(folder, 3, "ddp", 0.0), folder, 3, draw, 10)
            finished(folder, 1, "ddp", 0.0)
            said = (folder / "out").read_text().count("resumed from s3://")
    finally:
        server.kill()
        server.wait()
    print(
        f"{given.kills} kills in {EPOCHS} epochs: the end is the same to the bit: {same}; other worlds resumed: {said}"
    )
    results = {"machine": machine(), "store": "moto's server, s3fs", "kills": rows, "same": same, "other worlds": said}
    (ROOT / "benchmarks/results/stores.json").write_text(json.dumps(results, indent=1))
    return int(not same or said != 2)


if __name__ == "__main__":
    sys.exit(main())

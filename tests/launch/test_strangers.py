"""Another user of the host finds nothing of a job's that takes them in, whatever they try."""

from __future__ import annotations

import json
import os

import pytest

from tests import forked

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


def attacked(tmp_path, *words):
    done = forked.run(2, "tests.launch.strangers_pool", *words, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@needs_root
def test_another_user_reaches_nothing(tmp_path):
    found = attacked(tmp_path)
    assert found["connected"] == [] and found["entered"] == []
    assert found["files"] <= 0, "silent connections of theirs use up this user's files"
    assert found["supervisor"] == [] and found["unix"] == [], "nothing is listened at but gloo's own"
    assert found["loopback"] and len(found["ports"]) == 2 * 2, "one of gloo's per rank, and one for pieces of zero3"


@needs_root
def test_a_listener_left_open_is_found(tmp_path):
    found = attacked(tmp_path, "open")
    assert len(found["connected"]) == 2
    assert found["files"] > 100

"""Which errors count as the consequence of another rank's end."""

from __future__ import annotations

from distributedtorch.core.errors import PeerError
from distributedtorch.launch.record import is_consequence

GLOO = "[pair.cc:553] Connection closed by peer [127.0.0.1]:3504."


def caught(raising):
    try:
        raising()
    except BaseException as error:
        return error
    raise AssertionError


def lost():
    try:
        raise RuntimeError("unknown words of a back end")
    except RuntimeError as error:
        raise PeerError("rank 1 ended") from error


def own_while_handling_lost():
    try:
        lost()
    except PeerError:
        raise OSError("saving failed") from None


def lost_while_handling_own():
    try:
        raise ValueError("own")
    finally:
        lost()


def test_a_lost_peer_is_a_consequence_in_any_words():
    assert is_consequence(caught(lost))
    assert is_consequence(RuntimeError(GLOO))


def test_what_follows_a_lost_peer_is_a_consequence():
    assert is_consequence(caught(own_while_handling_lost))


def test_an_error_of_ones_own_is_not():
    assert not is_consequence(ValueError("Connection closed by peer"))
    assert not is_consequence(RuntimeError("shapes differ"))
    assert not is_consequence(caught(lost_while_handling_own))

"""Where the user's own code is: the line to name in a message, past the library, torch and the standard library."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType, TracebackType

FULL = "DISTRIBUTEDTORCH_TRACEBACK"
"""Set to `full`, tracebacks are shown with the frames of the library too."""

_INSTALLED = ("/site-packages/", "/dist-packages/")
_FOREIGN = (
    str(Path(__file__).resolve().parents[1]) + os.sep,
    *(sysconfig.get_paths()[kind] + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)
_PROMPTS = ("bdb", "code", "pydevd")
"""The modules whose code runs while somebody debugs the script."""


def is_users(filename: str) -> bool:
    """Whether a source file is the user's own, not the library's, an installed package's or Python's."""
    return not filename.startswith(_FOREIGN) and not any(part in filename for part in _INSTALLED)


def of_frame(frame: FrameType | None) -> str:
    """The innermost line of the user's own code at or above `frame`: "train.py:41 in load()"."""
    places = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(frame)]
    return _innermost(places)


def of_traceback(trace: TracebackType | None) -> str:
    """The innermost line of the user's own code in a traceback."""
    places = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(trace)]
    return _innermost(places[::-1])


def of_main_thread() -> str:
    """The line of the user's own code the main thread is at now; callable from any thread."""
    return of_frame(_main_frame())


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback with the frames of the user's own code; as it is where there are none, or where all are asked for."""
    links = []
    link = trace
    while link is not None:
        links.append(link)
        link = link.tb_next
    own = [link for link in links if is_users(link.tb_frame.f_code.co_filename)]
    if not own or os.environ.get(FULL) == "full":
        return trace
    kept: TracebackType | None = None
    for link in reversed(own):
        kept = TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept


def stack_of_main_thread() -> str:
    """Where the main thread is now, as `users_frames` of a traceback; callable from any thread."""
    stack = traceback.extract_stack(_main_frame())
    own = [frame for frame in stack if is_users(frame.filename)]
    return "".join(traceback.format_list(stack if not own or os.environ.get(FULL) == "full" else own))


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def at_prompt() -> bool:
    """Whether somebody debugs the main thread: a prompt of pdb or one made of it (ipdb, pudb), or of `code`."""
    prompts = {getattr(sys.modules.get(name), "__file__", None) for name in _PROMPTS}
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for file in (f.f_code.co_filename for f, _ in traceback.walk_stack(frame)):
        if file.startswith(_FOREIGN[0]):  # below is what has called the library, perhaps at a prompt
            return False
        if file in prompts and not is_users(file):
            return True
    return False


def _innermost(places: list[tuple[str, int, str]]) -> str:
    """`places` innermost first. Falls back to the innermost line of all where none is the user's."""
    own = [place for place in places if is_users(place[0])] or places
    if not own:
        return ""
    filename, line, function = own[0]
    inside = "" if function.startswith("<") else f" in {function}()"
    return f"{_short(filename)}:{line}{inside}"


def _short(filename: str) -> str:
    """Relative where it lies under the working folder, else as it is."""
    try:
        return str(Path(filename).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return filename

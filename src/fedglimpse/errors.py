"""Errors that a user is meant to read: one sentence, without a traceback."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable


class UserError(Exception):
    """Something that the user has to change, in one sentence with the value and the fix.

    The command line prints it without a traceback and exits with code 2.

    Attributes:
        key: the setting that has to change, such as "data.alpha"; empty where no setting is meant.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


def require(condition: bool, message: str, *, key: str = "") -> None:
    """Raise UserError with `message` unless the condition holds."""
    if not condition:
        raise UserError(message, key=key)


class DeviceLost(UserError):
    """A GPU no longer answers: whoever catches this must end the process at once.

    Freeing what lies on such a GPU fails as well, even while the interpreter shuts down.
    """


TOO_LARGE = (
    "There is not enough memory for this: take fewer seeds or lanes, a smaller engine.max_jobs, "
    "sketch.size, agent.buffer or agent.d_token, or fewer clients."
)


def lacks_memory(error: BaseException) -> bool:
    """True where the machine or a GPU ran out of memory."""
    if isinstance(error, MemoryError):
        return True
    phrases = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
    text = str(error)
    return any(phrase in text for phrase in phrases)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def reason_of(error: BaseException) -> str:
    """Return one line: a user's mistake as it is, anything else with its file and line."""
    if isinstance(error, UserError):
        return str(error)
    location = ""
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        file = frames[-1].filename.rpartition("/")[2]
        location = f" ({file}:{frames[-1].lineno})"
    first_line = str(error).partition("\n")[0]  # CUDA's errors continue with advice
    return f"{type(error).__name__}: {first_line}{location}"

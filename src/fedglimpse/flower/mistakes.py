"""A user's mistake in a Flower app ends in one sentence, as on the command line.

Flower takes an exception of a server app as the failure of its run, and writes the traceback to
the log. The first is right and stays as it is: a `SystemExit` would end the process without a word
to the SuperLink, and Flower's simulation would count it as success. The second tells a user
nothing, so that the sentence takes its place.
"""

from __future__ import annotations

import logging

from fedglimpse.errors import UserError

FLOWER = "flwr"  # Flower's logger


def say_mistakes_plainly() -> None:
    """Let Flower's log say a UserError without its traceback; once or more often is the same."""
    logging.getLogger(FLOWER).addFilter(_plainly)


def _plainly(record: logging.LogRecord) -> bool:
    """Put the sentence in the place of what Flower says of a UserError; all is logged."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, UserError):
        record.msg, record.args = "fedglimpse: %s", (str(error),)
        record.exc_info = record.exc_text = None
    return True

"""Reading a TOML file; whatever is wrong with it is one sentence."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from fedglimpse.errors import UserError


def read_table(file: Path, wanted: str = "TOML file") -> dict[str, Any]:
    """Return the file's tables as they are.

    Args:
        file: what a user named.
        wanted: what it should have been, for the error message.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no file {file}: give the path of a {wanted}.") from None
    except IsADirectoryError:
        raise UserError(f"{file} is a folder: give the path of a {wanted}.") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise UserError(
            f"{file} cannot be read ({reason}): mend access, or give another {wanted}."
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 ({error.reason}): save it as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {error}.") from None

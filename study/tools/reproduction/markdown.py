"""Markdown as the pages have it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a bar within a cell is escaped."""
    lines = [_line(header), "|---" * len(header) + "|", *map(_line, rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def folded(title: str, texts: Iterable[str]) -> str:
    """Return texts that open when their title is clicked."""
    return f"<details><summary>{title}</summary>\n\n{paragraphs(texts)}\n\n</details>"


def paragraphs(texts: Iterable[str]) -> str:
    """Return the texts that are not empty, an empty line between them."""
    return "\n\n".join(filter(None, texts))

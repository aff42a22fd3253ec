"""Markdown as the pages have it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a bar within a cell is escaped."""
    lines = [_line(head), "|---" * len(head) + "|", *(_line(row) for row in rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def folded(title: str, parts: Iterable[str]) -> str:
    """Return parts that open when their title is clicked."""
    inner = "\n\n".join(part for part in parts if part)
    return f"<details><summary>{title}</summary>\n\n{inner}\n\n</details>"


def paragraphs(parts: Iterable[str]) -> str:
    """Return the parts that say something, an empty line between them."""
    return "\n\n".join(part for part in parts if part)

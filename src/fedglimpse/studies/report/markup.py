"""Small pieces of HTML. Everything that comes from a study is escaped here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from fedglimpse.studies.report.analysis import Comparison
from fedglimpse.studies.report.numbers import interval, p_value

WIDTH, HEIGHT = 104, 18  # of an interval drawing


def table(head: Mapping[str, str], rows: Sequence[tuple[str, Sequence[str]]], css: str) -> str:
    """Return a table that becomes a list of cards on a narrow screen.

    Args:
        head: column title -> class of its cells.
        rows: attributes of the row, and the HTML of its cells.
        css: class of the table.
    """
    titles = "".join(f'<th scope="col" class="{css}">{escape(t)}</th>' for t, css in head.items())
    body = []
    for attributes, cells in rows:
        columns = zip(head.items(), cells, strict=True)
        line = "".join(
            f'<td class="{css}" data-label="{escape(title)}">{_value(cell)}</td>'
            for (title, css), cell in columns
        )
        body.append(f"<tr {attributes}>{line}</tr>")
    return (
        f'<table class="{css}"><thead><tr>{titles}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def _value(cell: str) -> str:
    return f'<span class="value">{cell}</span>' if cell else ""


def tags(setting: str, variant: str, **more: str) -> str:
    """Return the data attributes that filters look at."""
    found = {"setting": setting, "variant": variant, **more}
    return " ".join(f'data-{name}="{escape(value)}"' for name, value in found.items())


def name_of(variant: str, note: str = "") -> str:
    """Return a variant's name with the dot of its colour."""
    extra = f' <span class="note">{escape(note)}</span>' if note else ""
    dot = f'<i class="dot" data-dot="{escape(variant)}"></i>'
    return f'<span class="name">{dot}{escape(variant)}{extra}</span>'


def verdict(found: Comparison | None, neutral: bool = False) -> str:
    """Return a difference in points with its verdict, spelt out on hover.

    Args:
        found: the comparison; None where there is nothing to compare with.
        neutral: being higher is neither good nor bad.
    """
    if found is None:
        return '<span class="none">–</span>'
    kind = verdict_class(found)
    sign = {"up": "▲ real", "down": "▼ real"}.get(kind, found.verdict)
    title = f"p = {p_value(found.p)} after Holm's correction; {found.difference.pairs} seeds"
    colour = "apart" if neutral and found.verdict == "real" else kind
    return (
        f'<span class="difference">{escape(interval(found.difference))}</span> '
        f'<span class="verdict {colour}" title="{escape(title)}">{sign}</span>'
    )


def verdict_class(found: Comparison) -> str:
    """Return up or down for real differences, noise, or unknown."""
    if found.verdict == "real":
        return "up" if found.difference.mean > 0 else "down"
    return "noise" if found.verdict == "within noise" else "unknown"


def forest(found: Comparison | None, reach: float) -> str:
    """Draw a difference and its interval around zero; `reach` is the scale's end in shares."""
    middle = WIDTH / 2
    parts = [f'<line class="zero" x1="{middle}" x2="{middle}" y1="1" y2="{HEIGHT - 1}"/>']
    if found is not None:
        d = found.difference

        def x(value: float) -> float:
            return round(middle + (middle - 5) * max(-1.0, min(1.0, value / reach)), 1)

        y = HEIGHT / 2
        if d.low is not None and d.high is not None:
            parts.append(
                f'<line class="range" x1="{x(d.low)}" x2="{x(d.high)}" y1="{y}" y2="{y}"/>'
            )
        parts.append(f'<circle cx="{x(d.mean)}" cy="{y}" r="3.5"/>')
    kind = "none" if found is None else verdict_class(found)
    return (
        f'<svg class="forest {kind}" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" aria-hidden="true">{"".join(parts)}</svg>'
    )

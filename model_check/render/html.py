"""A trace as one self-contained HTML page that steps through it: no server, nothing to load."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from html import escape
from importlib.resources import files
from itertools import groupby

from model_check.render import words
from model_check.render.cards import moments
from model_check.render.effects import Kind
from model_check.render.story import Told, told, what_is_wrong
from model_check.render.text import READING, as_text, header
from model_check.render.trace import Trace


def as_html(trace: Trace) -> str:
    """The whole page. Without JavaScript it shows the same trace as text."""
    says = words.PROMISES.get(trace.promise, "")
    values = {
        "KICKER": "odb counterexample" if trace.promise else "odb trace",
        "TITLE": escape(trace.title),
        "VERDICT": _verdict(trace, says) if trace.promise else "",
        "WORLD": _rows(header(trace)[2 if trace.promise else 0 :]),
        "READING": escape(READING),
        "TEXT": escape(as_text(trace)),
        "DATA": _embedded(_data(trace)),
        "STYLE": _part("page.css"),
        "SCRIPT": _part("page.js"),
    }
    # One pass, so that nothing within a value is taken for a place to fill.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: values[match[1]], _part("page.html"))


def _verdict(trace: Trace, says: str) -> str:
    """What is wrong, above everything else."""
    first, *explained = what_is_wrong(trace)
    return (
        '<section class="verdict" aria-label="What is wrong">\n<p class="promise"><strong>Broken '
        f"promise: {escape(trace.promise)}</strong> <span>{escape(says)}</span></p>\n"
        f"{_paragraphs(explained if says else [first, *explained])}\n</section>"
    )


def _part(name: str) -> str:
    return files("model_check.render").joinpath(name).read_text(encoding="utf-8")


def _paragraphs(lines: Iterable[str]) -> str:
    """A paragraph for lines in a row, and a list for those that begin with a dash."""
    found = []
    for listed, block in groupby(lines, lambda line: line.startswith("- ")):
        if listed:
            items = (f"<li>{escape(line[2:])}</li>" for line in block)
            found.append("<ul>" + "\n".join(items) + "</ul>")
        else:
            found.append("<p>" + "\n".join(map(escape, block)) + "</p>")
    return "\n".join(found)


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    cells = (f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in rows)
    return "\n".join(cells)


def _data(trace: Trace) -> dict[str, object]:
    return {
        "window": trace.world.config.window,
        "queue": trace.world.queue,
        "coupled": trace.world.coupled,
        "promise": trace.promise,
        "steps": [_step(step) for step in told(trace)],
        "moments": [asdict(moment) for moment in moments(trace)],
    }


def _step(step: Told) -> dict[str, object]:
    return {
        "text": str(step.sentence),
        "effects": [
            {"text": f"rank {e.rank} {e.text}", "loss": e.kind is Kind.LOSS} for e in step.effects
        ],
        "error": step.error,
        "last": step.last,
    }


def _embedded(data: object) -> str:
    """JSON that cannot end the script element in which it stands."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

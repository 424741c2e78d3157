"""Read a page back: its panels with their charts and tables, its headings, and everything that it would load."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


@dataclass
class FoundPanel:
    title: str = ""
    badge: str = ""
    spec: dict[str, Any] | None = None
    label: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)

    def column(self, name: str) -> list[str]:
        return [row[self.columns.index(name)] for row in self.rows]

    def numbers(self, name: str) -> list[float]:
        return [float(text) for text in self.column(name) if text]


class Page(HTMLParser):
    """A parsed page."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.panels: list[FoundPanel] = []
        self.headings: list[tuple[int, str]] = []
        self.loaded: list[str] = []
        self.buttons: list[dict[str, str | None]] = []
        self.problems: list[str] = []
        self.title = ""
        self._inside: list[str] = []
        self._class = ""
        self.feed(content)

    @classmethod
    def read(cls, path: Path) -> "Page":
        return cls(path.read_text(encoding="utf-8"))

    def __getitem__(self, title: str) -> FoundPanel:
        return next(panel for panel in self.panels if panel.title == title)

    @property
    def titles(self) -> list[str]:
        return [panel.title for panel in self.panels]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._class = given.get("class") or ""
        for name in ("src", "href", "data", "action", "srcset"):
            if given.get(name):
                self.loaded.append(str(given[name]))
        if tag == "article":
            self.panels.append(FoundPanel())
        elif tag in ("h1", "h2", "h3"):
            self.headings.append((int(tag[1]), ""))
        elif tag == "button":
            self.buttons.append(given)
        elif tag == "tr" and "tbody" in self._inside:
            self.panels[-1].rows.append([])
        elif tag == "td":
            self.panels[-1].rows[-1].append("")
        elif tag == "th":
            self.panels[-1].columns.append(str(given["data-field"]))
        elif tag == "div" and self._class == "chart":
            self.panels[-1].label = given.get("aria-label") or ""
        if tag not in ("meta", "path", "td", "tr") or tag == "tr" and "tbody" not in self._inside:
            self._inside.append(f"{tag}.{self._class}" if tag in ("script", "span", "p") else tag)

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop().partition(".")[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        here = self._inside[-1] if self._inside else ""
        if here == "title":
            self.title += data
        elif here == "script.spec":
            self.panels[-1].spec = json.loads(data)
        elif here == "span.badge":
            self.panels[-1].badge += data
        elif here == "p.problem":
            self.problems.append(data)
        elif here in ("h1", "h2", "h3"):
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)
            if here == "h3":
                self.panels[-1].title = (self.panels[-1].title + data).strip()
        elif "tbody" in self._inside and self.panels[-1].rows and data.strip():
            self.panels[-1].rows[-1][-1] += data.strip("\n")


def fields_of(value: Any) -> set[str]:
    """Every field that the encodings of a chart name."""
    if isinstance(value, dict):
        own = {value["field"]} if isinstance(value.get("field"), str) else set()
        return own.union(*(fields_of(one) for one in value.values()))
    return set().union(*(fields_of(one) for one in value)) if isinstance(value, list) else set()


def marks_of(spec: dict[str, Any]) -> list[str]:
    """The kinds of marks of a chart."""
    return [layer["mark"]["type"] for layer in spec.get("layer", [spec])]

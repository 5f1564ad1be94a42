"""Writes a report with tables and curves to one HTML file that needs nothing from the network."""

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from swarm.machine.safe_files import SHARED, replace_file
from swarm.observability.plain_text import plain
from swarm.report.plot import new_figure


@dataclass(frozen=True, slots=True)
class Spread:
    """Values by seed, in the order of seeds."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        return cls(tuple(values))

    @property
    def mean(self) -> float:
        """0 without values."""
        return fmean(self.values) if self.values else 0.0

    @property
    def std(self) -> float:
        """Sample standard deviation; 0 for fewer than two seeds."""
        return stdev(self.values) if len(self.values) > 1 else 0.0

    def over(self, other: "Spread") -> "Spread":
        """Ratio seed by seed; seeds in which `other` is 0 are left out."""
        return Spread.of(a / b for a, b in zip(self.values, other.values, strict=True) if b)

    def rounded(self) -> dict[str, float]:
        return {"mean": round(self.mean, 4), "std": round(self.std, 4)}

    def text(self, digits: int) -> str:
        if len(self.values) < 2:
            return f"{self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f} ± {self.std:.{digits}f}"


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}code{background:#f4f4f4}"
)


@dataclass(frozen=True, slots=True)
class Table:
    """Headers and rows of equal length; the first column names the row."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> "ForTerminal":
        """For `rich`'s console."""
        return ForTerminal(self)

    def parts(self, width: int) -> list[RichTable]:
        """For so many columns of text: as many tables as it takes to cut off no number."""
        sizes = [
            max(len(row[i]) for row in [*self.rows, _longest_words(self.headers)]) + 3 for i in range(len(self.headers))
        ]
        parts, room = list[list[int]](), 0
        for column in range(1, len(self.headers)):
            if not parts or sizes[column] > room:
                parts.append([0])
                room = width - 1 - sizes[0]
            parts[-1].append(column)
            room -= sizes[column]
        return [self._part(columns, self.title if number == 0 else None) for number, columns in enumerate(parts)]

    def _part(self, columns: Sequence[int], title: str | None) -> RichTable:
        table = RichTable(title=None if title is None else Text(plain(title)), title_justify="left")
        for column in columns:
            longest = max(map(len, self.headers[column].split()), default=0)  # rich would cut it to fit the rest
            table.add_column(
                Text(plain(self.headers[column])), justify="right" if column else "left", min_width=longest
            )
        for row in self.rows:
            table.add_row(*(Text(plain(row[column])) for column in columns))
        return table

    def markdown(self) -> str:
        lines = [self.headers, ["---"] * len(self.headers), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def folded_html(self) -> str:
        """As `html`, closed until a reader opens it by its title."""
        return f"<details><summary>{html.escape(self.title)}</summary>{self.html(with_title=False)}</details>"

    def html(self, *, with_title: bool = True) -> str:
        head = "".join(f"<th>{html.escape(header)}</th>" for header in self.headers)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        title = f"<h2>{html.escape(self.title)}</h2>" if with_title else ""
        return f"{title}<table><tr>{head}</tr>{body}</table>"


def _longest_words(headers: Sequence[str]) -> list[str]:
    """Of each header, which breaks between words."""
    return [max(header.split(), key=len, default="") for header in headers]


@dataclass(frozen=True, slots=True)
class ForTerminal:
    """A table that fits itself to the console it is printed on."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.table.parts(options.max_width)


@dataclass(frozen=True, slots=True)
class Curves:
    """Lines over one axis."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    """{label: (x, y)}"""


_NUM_COLOURS = 10
_LINE_STYLES = ("-", "--", ":")


def plot(curves: Sequence[Curves]) -> bytes:
    """PNG with the axes side by side. Raises SwarmError where matplotlib is not installed."""
    figure, axes = new_figure(len(curves))
    for axis, drawn in zip(axes, curves, strict=True):
        for number, (label, (x, y)) in enumerate(drawn.lines.items()):
            axis.plot(x, y, label=label, linestyle=_LINE_STYLES[number // _NUM_COLOURS % len(_LINE_STYLES)])
        axis.set_title(drawn.title, loc="left", fontsize=10)
        axis.set(xlabel=drawn.x_label, ylabel=drawn.y_label)
        axis.locator_params(axis="x", nbins=6)
    if all(list(drawn.lines) == list(curves[0].lines) for drawn in curves):
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, fontsize=8, frameon=False, loc="outside right center")
    else:
        for axis in axes:
            axis.legend(fontsize=8, frameon=False, loc="best")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def write_report(path: Path, title: str, paragraphs: Sequence[str], tables: Sequence[Table], picture: bytes) -> None:
    """One HTML file that holds everything, the picture too; empty bytes are no picture."""
    prose = "".join(f"<p>{html.escape(text)}</p>" for text in paragraphs)
    body = f"<h1>{html.escape(title)}</h1>{prose}"
    if picture:
        body += f"<img alt='curves' src='data:image/png;base64,{base64.b64encode(picture).decode()}'>"
    body += "".join(table.html() for table in tables)
    page = f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style>{body}\n"
    replace_file(path, page, SHARED)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each position."""
    return [sum(part) / len(part) for part in (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))]

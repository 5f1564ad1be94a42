"""Draws curves as inline SVG without scripts, and holds the style of a report for light and dark screens and paper."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_LIGHT = (
    "--ground:#fff;--text:#1c2126;--soft:#535c66;--edge:#d9dedb;--h0:#1d5bc4;--h1:#b3541e;--h2:#197a4b;--h3:#8b3fa8;"
    "--h4:#0c7c8c;--h5:#ad2f5b;--h6:#6d6a12;--h7:#4b5563;color-scheme:light"
)
_DARK = (
    "--ground:#101316;--text:#e7eaec;--soft:#a4aeb8;--edge:#2e363d;--h0:#7fb0ff;--h1:#f0a06a;--h2:#63cf94;--h3:#d295ec;"
    "--h4:#5ccadb;--h5:#f58cb0;--h6:#d3cd5c;--h7:#b3bcc6;color-scheme:dark"
)
STYLE = (
    f":root{{{_LIGHT}}}@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    "body{margin:0;background:var(--ground);color:var(--text);font:15px/1.5 system-ui,sans-serif}"
    "main,footer{max-width:1100px;margin:0 auto;padding:1em 20px}h1{margin:.5em 0 0}h2{font-size:19px;margin:1.8em 0 .5em}"
    "footer,.note,figcaption{color:var(--soft)}figcaption{font-weight:600;margin-bottom:4px}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:18px}figure{margin:0}"
    "svg{width:100%;height:auto;display:block}.grid line{stroke:var(--edge)}.grid text{fill:var(--soft);font-size:11.5px}"
    ".line{fill:none;stroke:var(--hue);stroke-width:2;stroke-linejoin:round}"
    + "".join(f".hue-{number}{{--hue:var(--h{number})}}" for number in range(8))
    + ".dash-1{stroke-dasharray:7 4}.dash-2{stroke-dasharray:2 4}.dash-3{stroke-dasharray:10 3 2 3}"
    ".legend{list-style:none;display:flex;flex-wrap:wrap;gap:0 16px;padding:0;margin:6px 0;font-size:13px}"
    ".legend i{display:inline-block;width:18px;border-top:3px solid var(--hue);vertical-align:middle;margin-right:6px}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto;max-width:100%}"
    "th,td{padding:.3em .9em;border-bottom:1px solid var(--edge);text-align:right;white-space:nowrap;unicode-bidi:isolate}"
    "th{color:var(--soft);font-weight:600;font-size:13px}td:first-child,th:first-child{text-align:left;padding-left:0}"
    "td:nth-child(2):not(:last-child),td:last-child{white-space:normal}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px}summary{cursor:pointer}"
    "@media print{details pre{font-size:10px}}"
)
"""Text in both themes has a contrast of 4.5:1 or more."""


_WIDTH, _HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 10, 26
_NUM_HUES = 8
_NUM_DASHES = 4


@dataclass(frozen=True, slots=True)
class Curve:
    """One line: [N] rounds and [N] values, None where there was none."""

    rounds: Sequence[int]
    values: Sequence[float | None]


def svg_curves(title: str, unit: str, curves: Mapping[str, Curve]) -> str:
    """A figure with a legend where there are several lines; its description has the first and last value of each."""
    known = [
        (r, v) for curve in curves.values() for r, v in zip(curve.rounds, curve.values, strict=True) if v is not None
    ]
    name = html.escape(title)
    if not known:
        return f"<figure><figcaption>{name}</figcaption><p class='note'>No values.</p></figure>"
    first, last = min(r for r, _ in known), max(r for r, _ in known)
    low, high = min(0.0, *(v for _, v in known)), max(v for _, v in known)
    last, high = max(last, first + 1), high if high > low else low + 1.0

    def x(round_number: float) -> float:
        return _LEFT + (round_number - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    marks = [
        f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y(v):.1f}' y2='{y(v):.1f}'/>"
        f"<text x='{_LEFT - 6}' y='{y(v) + 4:.1f}' text-anchor='end'>{_short(v)}</text>"
        for v in ticks(low, high, 4)
    ]
    marks += [
        f"<text x='{x(r):.1f}' y='{_HEIGHT - 6}' text-anchor='middle'>{r:,.0f}</text>"
        for r in ticks(first, last, 6)
        if r == int(r)
    ]
    lines = [
        f"<path class='line {_look(place)}' d='{_path(curve, x, y)}'/>" for place, curve in enumerate(curves.values())
    ]
    summary = html.escape("; ".join(f"{label}: {_told(curve, unit)}" for label, curve in curves.items()))
    legend = "".join(
        f"<li class='{_look(place)}'><i></i>{html.escape(label)}</li>" for place, label in enumerate(curves)
    )
    return (
        f"<figure><figcaption>{name}, {html.escape(unit)}</figcaption>"
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{name}. {summary}'>"
        f"<g class='grid'>{''.join(marks)}</g>{''.join(lines)}</svg>"
        + (f"<ul class='legend'>{legend}</ul>" if len(curves) > 1 else "")
        + "</figure>"
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers within [low, high]."""
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next((factor * unit for factor in (1, 2, 5, 10) if factor * unit >= 0.7 * raw), 10 * unit)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
    """Mean of the known ones of the last `window`; None where the value itself is missing."""
    smoothed: list[float | None] = []
    for place, value in enumerate(values):
        known = [v for v in values[max(0, place + 1 - window) : place + 1] if v is not None]
        smoothed.append(None if value is None else sum(known) / len(known))
    return smoothed


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == 0 or abs(value) >= 100 else f"{value:.3g}"


def _look(place: int) -> str:
    return f"hue-{place % _NUM_HUES} dash-{place // _NUM_HUES % _NUM_DASHES}"


def _path(curve: Curve, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    parts: list[str] = []
    is_on = False
    for round_number, value in zip(curve.rounds, curve.values, strict=True):
        if value is not None:
            parts.append(f"{'L' if is_on else 'M'}{x(round_number):.1f} {y(value):.1f}")
        is_on = value is not None
    return "".join(parts)


def _told(curve: Curve, unit: str) -> str:
    known = [value for value in curve.values if value is not None]
    return f"from {_short(known[0])} to {_short(known[-1])} {unit}" if known else "no values"

"""Curves as inline SVG: no script, no file beside it, colours from the page's style."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
    told = html.escape("; ".join(f"{label}: {_told(curve, unit)}" for label, curve in curves.items()))
    legend = "".join(
        f"<li class='{_look(place)}'><i></i>{html.escape(label)}</li>" for place, label in enumerate(curves)
    )
    return (
        f"<figure><figcaption>{name}, {html.escape(unit)}</figcaption>"
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{name}. {told}'>"
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

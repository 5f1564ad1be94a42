"""Counters and gauges of one node in Prometheus form. Names are `area/name` with the unit last: `rollout/tokens_per_s`."""

import threading
from collections import defaultdict

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

_MAX_LABEL_SETS = 64
_OVERFLOW = "other"


class Metrics:
    """A registry of its own per node, so that several nodes live in one process. Thread-safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._metrics: dict[str, Counter | Gauge] = {}
        self._label_sets: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter. Label values must come from code; beyond 64 sets they are counted as `other`."""
        counter = self._labelled(Counter, name, labels)
        assert isinstance(counter, Counter), f"{name} is a gauge"
        counter.inc(amount)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        gauge = self._labelled(Gauge, name, labels)
        assert isinstance(gauge, Gauge), f"{name} is a counter"
        gauge.set(value)

    def value(self, name: str, **labels: str) -> float | None:
        """Current value, None where nothing was recorded."""
        with self._lock:
            is_counter = isinstance(self._metrics.get(name), Counter)
        return self._registry.get_sample_value(_prometheus_name(name) + "_total" * is_counter, labels)

    def render(self) -> bytes:
        """Text exposition format."""
        return generate_latest(self._registry)

    def _labelled(self, kind: type[Counter] | type[Gauge], name: str, labels: dict[str, str]) -> Counter | Gauge:
        with self._lock:
            metric = self._metrics.get(name)
            if metric is None:
                metric = kind(_prometheus_name(name), name, tuple(labels), registry=self._registry)
                self._metrics[name] = metric
            if not labels:
                return metric
            known, values = self._label_sets[name], tuple(labels.values())
            if values not in known and len(known) >= _MAX_LABEL_SETS:
                values = (_OVERFLOW,) * len(values)
            known.add(values)
            return metric.labels(*values)


def _prometheus_name(name: str) -> str:
    return "swarm_" + "".join(c if c.isalnum() else "_" for c in name)

"""Sends spans to an OpenTelemetry collector over OTLP/HTTP, in batches from a thread of the library.

The library's queue is bounded. Spans that do not fit, or that no collector accepts, are lost.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from swarm.observability.tracing import Facts, watch

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5
_EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class OtelTracer:
    """Watches all traced functions of the process until it is closed. Rows are nothing to it."""

    def __init__(self, endpoint: str, facts: dict[str, str]) -> None:
        """`endpoint`: the collector's address without /v1/traces. `facts`: of the node, for every span."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(f"{endpoint.rstrip('/')}/v1/traces")))
        self._tracer = self._provider.get_tracer("swarm")
        watch(self)

    @contextmanager
    def span(self, name: str) -> Iterator[Callable[[Facts], Any]]:
        with self._tracer.start_as_current_span(name) as span:
            yield span.set_attributes

    def write(self, row: dict[str, Any]) -> None:
        """A round is a span already."""

    def close(self) -> None:
        """Send what waits; blocks for some seconds where the collector is gone."""
        watch(None)
        self._provider.shutdown()


def _exporter(address: str) -> Any:
    """One that says once that nobody takes the spans; the library's own would say so again and again."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult

    class Exporter(OTLPSpanExporter):
        has_told = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = super().export(spans)
            if result is not SpanExportResult.SUCCESS and not self.has_told:
                self.has_told = True
                logger.error("spans are lost: no collector takes them at %s; the node goes on", address)
            return result

    logging.getLogger(_EXPORTER_LOGGER).setLevel(logging.CRITICAL)
    return Exporter(endpoint=address, timeout=_TIMEOUT_S)

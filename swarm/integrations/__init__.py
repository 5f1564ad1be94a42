"""External tools that watch a node: TensorBoard, Weights & Biases, OpenTelemetry, a model hub.

    compute thread ─ NodeReport.record(row) ─→ [QueuedSink] ─ thread ─→ TensorboardSink, WandbSink, HubPush
    traced functions ─────────────────────────→ [OtelTracer] ─ thread ─→ collector

None of them can block or end a node: rows wait in a bounded queue, and a failing sink is reported once and not used again.
"""

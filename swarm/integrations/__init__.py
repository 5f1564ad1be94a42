"""Tools of others that watch a node: TensorBoard, Weights & Biases, OpenTelemetry, a model hub.

    compute thread ─ NodeReport.record(row) ─→ [QueuedSink] ─ thread ─→ TensorboardSink, WandbSink, HubPush
    traced functions ─────────────────────────→ [OtelTracer] ─ thread ─→ collector

None of them can hold up or end a node: rows wait in a bounded queue, and a sink that fails is told once and left alone.
"""

"""Bounds how long a request to a model hub waits. Its client waits for ever by itself."""

ANSWER_TIMEOUT_S = 60.0
"""For a connection, and for each next part of what is sent or answered. The client tries an upload up to six times."""


def bound_hub_requests(timeout_s: float = ANSWER_TIMEOUT_S) -> None:
    """Let every request that names no bound of its own end after `timeout_s` without progress, in this whole process."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    def client() -> object:
        made = _http.default_client_factory()
        made.timeout = timeout_s
        return made

    set_client_factory(client)  # type: ignore[arg-type] - the type of its client is another in each version

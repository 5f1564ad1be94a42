"""The service that renders an untrusted chat template, in the confined process of `line_process`.

opening:  nothing
question: {"template": text, "special_tokens": {name: text}, "chats": [[message, …], …], "tools": [function, …] or null,
           "arguments": {name: value}}
reply:    {"texts": [text, …]} or {"error": text}
"""

from collections.abc import Callable
from typing import Any

from swarm.sandbox.inside.file_guard import close_files

_MAX_MESSAGE_CHARS = 200


def start(opening: None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load the code that renders templates, then give up access to all files but those of installed packages."""
    from transformers.utils.chat_template_utils import render_jinja_template

    close_files()

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        try:
            texts, _ = render_jinja_template(
                question["chats"],
                tools=question["tools"],
                chat_template=question["template"],
                add_generation_prompt=True,
                **{**question["arguments"], **question["special_tokens"]},
            )
        except (Exception, MemoryError) as error:  # a template may fail in any way
            return {"error": f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]}
        return {"texts": texts}

    return answer

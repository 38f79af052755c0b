"""Anthropic's Messages API as data, over the chats of `headrace.openai`: a request becomes a chat request, and what it
may say is checked there.

- `schema.py`: the request bodies as msgspec structs, and names that are no fields of them.
- `conversation.py`: `system` and `messages` as chat messages.
- `requests.py`: tools, thinking and the rest, as a chat request.
- `answers.py`: the message, whole or as events.
- `errors.py`: the error object.
"""

from __future__ import annotations

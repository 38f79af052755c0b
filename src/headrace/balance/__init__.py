"""Which of several engines or servers gets a request: prefix against load. Pure, and without a clock.

- `choice.py`: the choice among candidates.
- `prefix_table.py`: hashes of prefixes, and who has computed them.

Used by the router (`server/route`) for servers, and by `engine/group.py` for the engines of one server.
"""

from __future__ import annotations

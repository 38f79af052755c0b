"""Schemathesis: random requests from the server's OpenAPI document, right and wrong ones, and a look at each answer.

Not checked is whether every request that fits the document is accepted: a schema cannot say, for example, that a token
id must be in the vocabulary, or that a prompt must fit into the context.
"""

from __future__ import annotations

import os
import tempfile

from tests.clients.checks import ADMIN_KEY, check, main, shell

RANDOM_REQUESTS = r"""
# docs: run
schemathesis run $BASE/openapi.json --header "Authorization: Bearer $KEY" --workers 4 --request-timeout 120 \
    --phases coverage,fuzzing --max-examples 10 --exclude-checks positive_data_acceptance
# docs: end
"""
COMMAND = RANDOM_REQUESTS.partition("# docs: end")[0].rstrip()  # more options can follow


@check
def every_route_with_an_ordinary_key() -> None:
    """Admin routes answer 403. A failure, an undocumented status or a wrong content type is a non-zero exit code."""
    printed = shell(f"{COMMAND} --seed 1 --no-color")
    assert "Tested: " in printed and " passed" in printed, printed


@check
def admin_routes_with_the_admin_key() -> None:
    """Without /admin/drain, which would stop the server."""
    printed = shell(
        f"{COMMAND} --seed 1 --no-color --include-path-regex '^/admin/|_profile$' --exclude-path /admin/drain",
        KEY=ADMIN_KEY,
    )
    assert "Tested: 7" in printed, printed


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())  # it leaves a folder for its cache
    main("schemathesis")

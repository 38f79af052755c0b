"""`ab` (ApacheBench): a load of one request, with and without keep-alive, and how refused requests show."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile

from tests.clients.checks import check, main, shell

BODY = r"""
# docs: body
cat > body.json <<END
{"model": "$MODEL", "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": true}
END
# docs: end
"""
LOAD = r"""
# docs: load
ab -l -n 40 -c 4 -p body.json -T application/json -H "Authorization: Bearer $KEY" $URL/completions
# docs: end
"""


def counts(printed: str) -> dict[str, int]:
    """The lines with counts of requests."""
    found = re.findall(r"^([A-Z][\w -]+(?:requests|responses)):\s+(\d+)", printed, flags=re.MULTILINE)
    return {name: int(count) for name, count in found}


@check
def every_request_is_answered() -> None:
    shell(BODY)
    assert counts(shell(LOAD)) == {"Complete requests": 40, "Failed requests": 0}


@check
def every_request_is_answered_with_keep_alive() -> None:
    """ab speaks HTTP/1.0, after which the server closes the connection: with -k nothing fails, and none is kept."""
    found = counts(shell(LOAD.replace("ab -l", "ab -l -k")))
    assert found == {"Complete requests": 40, "Failed requests": 0, "Keep-Alive requests": 0}


@check
def refused_requests_are_counted_as_non_2xx() -> None:
    found = counts(shell(LOAD, KEY="wrong"))
    assert found == {"Complete requests": 40, "Failed requests": 0, "Non-2xx responses": 40}


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    shown = subprocess.run(["ab", "-V"], capture_output=True, text=True, check=True).stdout
    main("ab", installed=re.findall(r"Version (\S+)", shown)[0])

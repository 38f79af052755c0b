"""Refuses to resume a job whose input or settings have changed: its results would come from two different jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import JobError
from headrace.jobs.formats import Source, SourceIdentity, what_changed
from headrace.jobs.formats.locations import num_bytes
from headrace.jobs.spec import JobSpec
from headrace.jobs.store.fingerprint import CONTENTS, first_difference
from headrace.jobs.store.manifest import Manifest

TEMPLATE = "template"  # of a fingerprint: known only once the model is open


def agreed_identity(job: JobSpec, source: Source, earlier: Manifest | None) -> SourceIdentity | None:
    """The identity of the input. Refused if lines of the earlier run have changed; lines may be added."""
    if earlier is None:
        return source.identity()
    if earlier.identity is None:
        raise JobError(
            f"the job in {job.directory} read its input from a pipe, which cannot be read again: print its committed "
            f"results with 'headrace status {job.directory} --results'; give another output with -o, or --overwrite"
        )
    if source.identity(0) is None:
        raise JobError(
            f"the job in {job.directory} was started with the input {earlier.input}, now it is {job.input}, which is "
            "not a file; give the file, another output with -o, or --overwrite"
        )
    change = what_changed(source, earlier.identity)
    if change is not None:
        raise JobError(
            f"the input has changed since the job in {job.directory} was started: {change}; restore it, give another "
            "output with -o, or --overwrite"
        )
    return source.identity() if num_bytes(job.input) > earlier.identity.size else earlier.identity


def check_fingerprint(job: JobSpec, fingerprint: Mapping[str, Any], earlier: Manifest | None) -> None:
    if earlier is None:
        return
    known = {name: value for name, value in earlier.fingerprint.items() if name in fingerprint or name != TEMPLATE}
    unknown = [name for name in CONTENTS if known.get(name) is None or fingerprint.get(name) is None]
    difference = first_difference(_without(known, unknown), _without(fingerprint, unknown))
    if difference is not None:
        name, old, new = difference
        raise JobError(
            f"the job in {job.directory} was started with {name}={_shown(old)}, now {name}={_shown(new)}: its results "
            "would not belong together; give the earlier value, another output with -o, or --overwrite"
        )


def _without(fingerprint: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: value for name, value in fingerprint.items() if name not in names}


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)

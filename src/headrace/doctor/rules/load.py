"""What is around the engine: the client, refusals, the server's front, and the input and disk of a job."""

from __future__ import annotations

from headrace.bench.load.cost import MAX_CPU_SHARE, MAX_LAG_P99_MS
from headrace.doctor.evidence import Evidence
from headrace.doctor.findings import Advice, Finding, Rule

MAX_LAG_SHARE = 0.05  # of the time to first token (p95): a smaller lag of the client hides nothing
MAX_UNANSWERED_SHARE = 0.01  # the guides' alert (C2)
MAX_LOOP_LAG_P95_S = 0.1  # as the alert in docs/metrics.md
MAX_LOOP_LAG_P75_S = 0.05  # servers look once a second: the p95 of a short interval is one late look
MIN_LIMITED_SHARE = 0.3  # of a job's time under one bottleneck
MAX_WAITING = 100  # the guides' alert (C2)
QUEUE_PER_SLOT = 4  # waiting requests; more wait longer than four others run
MIN_QUEUE_LIMIT = 1024  # Headrace's default: a lower limit refuses the clients of an ordinary load test


def is_client_bound(evidence: Evidence) -> bool:
    return bool(_client_numbers(evidence))


def _client_numbers(evidence: Evidence) -> list[tuple[str, str]]:
    client = evidence.client
    if client is None:
        return []
    found = []
    if client.cpu_share is not None and client.cpu_share > MAX_CPU_SHARE:
        found.append(("busiest client process", f"{client.cpu_share:.0%} of a core"))
    if client.loop_lag_p99_ms is not None and client.loop_lag_p99_ms > _max_lag_ms(evidence):
        found.append(("client's event loop, p99", f"{client.loop_lag_p99_ms:.0f} ms late"))
    if client.send_late_p99_ms is not None and client.send_late_p99_ms > _max_lag_ms(evidence):
        found.append(("requests sent after they were due, p99", f"{client.send_late_p99_ms:.0f} ms"))
    return found


def _max_lag_ms(evidence: Evidence) -> float:
    """A lag that is small beside the latencies, also one of sending, hides nothing of the server."""
    return max(MAX_LAG_P99_MS, MAX_LAG_SHARE * 1e3 * (evidence.ttft_p95_s or 0.0))


def client_bound(evidence: Evidence) -> Finding | None:
    numbers = _client_numbers(evidence)
    if not numbers:
        return None
    return Finding(
        severity="problem",
        title="the load generator is the bottleneck",
        numbers=tuple(numbers),
        why="The client did not keep up, so latencies include its own delay and rates are those that it can send. The "
        "server may be faster than these figures.",
        advice=(Advice(text="use more client processes, or another machine; then measure again", certainty="certain"),),
    )


def refusals(evidence: Evidence) -> Finding | None:
    share = evidence.unanswered_share
    if share is None or share < MAX_UNANSWERED_SHARE:
        return None
    refused, failed = evidence.num_refused or 0.0, evidence.num_failed or 0.0
    return Finding(
        severity="problem",
        title="requests were refused or failed: the figures are of the others",
        numbers=(
            ("refused", f"{refused:,.0f}"),
            ("failed or timed out", f"{failed:,.0f}"),
            ("not answered", f"{share:.1%} of all"),
        ),
        why="A refused request costs the server nothing and shortens its queue. Latencies are of the answered requests "
        "only, and a load test that counts refusals as requests looks fast.",
        advice=(
            Advice(text="lower the load until nothing is refused, and compare rates there", certainty="certain"),
            Advice(
                text="a larger queue (max_num_queued_reqs) trades refusals for waiting time, not for throughput",
                certainty="certain",
                setting="max_num_queued_reqs",
            ),
        ),
    )


def front_bound(evidence: Evidence) -> Finding | None:
    lag, usual = evidence.event_loop_lag_p95_s, evidence.event_loop_lag_p75_s
    if lag is None or lag < MAX_LOOP_LAG_P95_S or (usual is not None and usual < MAX_LOOP_LAG_P75_S):
        return None
    return Finding(
        severity="problem",
        title="the server's front is the bottleneck (HTTP, tokenizer)",
        numbers=(
            ("event loop lag, p95", f"{lag * 1e3:,.0f} ms"),
            *([("event loop lag, p75", f"{usual * 1e3:,.0f} ms")] if usual is not None else []),
        ),
        why="The process that parses, tokenizes and streams runs late. The engine waits for its requests, and clients "
        "get their tokens late.",
        advice=(
            Advice(
                text="send fewer, longer requests or fewer streams; give the front a core of its own; "
                "or run a second server behind a balancer",
                certainty="rule of thumb",
            ),
        ),
    )


def limited_share(evidence: Evidence, limit: str) -> float:
    """Share of a job's time in which this was its bottleneck."""
    seconds = evidence.limited_by_seconds or {}
    return seconds.get(limit, 0.0) / max(1e-9, sum(seconds.values()))


def disk_bound(evidence: Evidence) -> Finding | None:
    share = limited_share(evidence, "disk")
    if share < MIN_LIMITED_SHARE:
        return None
    return Finding(
        severity="problem",
        title="the job is limited by its disk",
        numbers=(("time limited by writing answers", f"{share:.0%}"),),
        why="The main loop spends its time on writing and syncing answers, and submits no lines meanwhile.",
        advice=(
            Advice(
                text="write the output to a local disk, and move it to its place afterwards",
                certainty="bound",
                gain=1 / max(0.05, 1 - share) - 1,
                why="all of this time would be free",
            ),
        ),
    )


def tokenizer_bound(evidence: Evidence) -> Finding | None:
    share = limited_share(evidence, "reading")
    if share < MIN_LIMITED_SHARE or share < limited_share(evidence, "tail"):
        return None  # a job that is mostly tail is too short for its start to count
    return Finding(
        severity="problem",
        title="the job is limited by reading and tokenizing its input",
        numbers=(("time in which the engine waited for lines", f"{share:.0%}"),),
        why="Slots are free and no line is ready: parsing, templates and tokenizing are slower than the engine.",
        advice=(
            Advice(
                text="give the job another core (inputs of 50,000 lines or more are tokenized by a second process); "
                "store the input uncompressed on a local disk",
                certainty="bound",
                gain=1 / max(0.05, 1 - share) - 1,
                why="all of this time would be free",
            ),
        ),
    )


def job_host_bound(evidence: Evidence) -> Finding | None:
    share = limited_share(evidence, "host")
    if share < MIN_LIMITED_SHARE or share < limited_share(evidence, "tail"):
        return None  # a job that is mostly tail is too short for its start to count
    return Finding(
        severity="problem",
        title="the job is limited by its host process",
        numbers=(
            ("time limited by the host", f"{share:.0%}"),
            *([("host time", f"{evidence.host_share:.0%} of a step")] if evidence.host_share is not None else []),
        ),
        why="Lines are ready and slots are free, or planning a step takes longer than computing it.",
        advice=(
            Advice(
                text="give the process a core of its own; longer answers per line cost less host time per token",
                certainty="bound",
                gain=1 / max(0.05, 1 - share) - 1,
                why="all of this time would be free",
            ),
        ),
    )


def job_tail(evidence: Evidence) -> Finding | None:
    share = limited_share(evidence, "tail")
    if share < MIN_LIMITED_SHARE:
        return None
    return Finding(
        severity="limit",
        title="the last lines of the job run with free slots",
        numbers=(("time in which only the last lines ran", f"{share:.0%}"),),
        why="All input is read and nothing waits: the longest answers end alone, and their steps are small.",
        advice=(
            Advice(
                text="put more lines into one job, or lower --max-tokens if the longest answers are not needed",
                certainty="certain",
            ),
        ),
    )


def stalled(evidence: Evidence) -> Finding | None:
    """Sequences run, and no token is computed."""
    if not evidence.num_running or evidence.output_tokens or evidence.prompt_tokens:
        return None
    return Finding(
        severity="problem",
        title="the engine is stalled: sequences run and no token is computed",
        numbers=(("running", f"{evidence.num_running:,.0f}"), ("tokens", f"0 in {evidence.seconds or 0.0:,.1f} s")),
        why="A step hangs or takes longer than the interval, or the engine has died and its gauges are old.",
        advice=(
            Advice(
                text="run doctor again with a longer --interval; if there are still no tokens, read the server's log "
                "and restart it",
                certainty="certain",
            ),
        ),
    )


def unlimited_queue(evidence: Evidence) -> Finding | None:
    """vLLM's queue has no limit unless one is set. Headrace's has one, so that only a queue that is long for its slots
    counts."""
    waiting, slots = evidence.num_waiting, evidence.number("max_num_seqs")
    is_long = waiting is not None and waiting > MAX_WAITING
    limit = evidence.settings.get("max_num_queued_reqs")
    if evidence.engine == "vllm":
        if limit is not None:
            return None
        title, shown = "the queue has no limit", "not set: no limit"
        value = max(MIN_QUEUE_LIMIT, int(QUEUE_PER_SLOT * slots)) if slots else MIN_QUEUE_LIMIT
    else:
        if not is_long or not slots or (waiting or 0.0) <= QUEUE_PER_SLOT * slots:
            return None
        title, shown = "the queue is longer than requests can wait for", "not reported" if limit is None else str(limit)
        value = int(QUEUE_PER_SLOT * slots)
    numbers = [("max_num_queued_reqs", shown)]
    if waiting is not None:
        numbers.append(("waiting", f"{waiting:,.0f}" + (f" for {slots:,.0f} slots" if slots else "")))
    return Finding(
        severity="problem" if is_long else "note",
        title=title,
        numbers=tuple(numbers),
        why="Under overload every request waits longer and longer, and clients give up on requests that are then "
        "computed in vain. A limit refuses early, and clients retry elsewhere.",
        advice=(
            Advice(
                text=f"set --max-num-queued-reqs {value}",
                certainty="rule of thumb",
                setting="max_num_queued_reqs",
                value=value,
            ),
        ),
    )


RULES = (
    Rule(
        id="client",
        title="client-bound",
        guide="D4",
        threshold=f"client over {MAX_CPU_SHARE:.0%} of a core, or late by {MAX_LAG_P99_MS:.0f} ms and "
        f"{MAX_LAG_SHARE:.0%} of the TTFT",
        check=client_bound,
        needs=("client",),
        sources=("online",),
        limit="client",
    ),
    Rule(
        id="stalled",
        title="stalled engine",
        guide="C1",
        threshold="no token in the interval while sequences run",
        check=stalled,
        needs=("num_running", "output_tokens", "prompt_tokens"),
        sources=("live",),
        limit="stall",
    ),
    Rule(
        id="refusals",
        title="refusals make a load test look fast",
        guide="C2",
        threshold=f"{MAX_UNANSWERED_SHARE:.0%} of requests not answered",
        check=refusals,
        needs=("unanswered_share",),
        sources=("live", "online"),
    ),
    Rule(
        id="disk",
        title="disk-bound job",
        guide="",
        threshold=f"{MIN_LIMITED_SHARE:.0%} of the job's time limited by writing",
        check=disk_bound,
        needs=("limited_by_seconds",),
        sources=("job",),
        limit="disk",
    ),
    Rule(
        id="tokenizer",
        title="tokenizer-bound job",
        guide="",
        threshold=f"{MIN_LIMITED_SHARE:.0%} of the job's time limited by reading",
        check=tokenizer_bound,
        needs=("limited_by_seconds",),
        sources=("job",),
        limit="reading",
    ),
    Rule(
        id="job-host",
        title="host-bound job",
        guide="",
        threshold=f"{MIN_LIMITED_SHARE:.0%} of the job's time limited by the host",
        check=job_host_bound,
        needs=("limited_by_seconds",),
        sources=("job",),
        limit="host",
    ),
    Rule(
        id="job-tail",
        title="tail of a job",
        guide="",
        threshold=f"{MIN_LIMITED_SHARE:.0%} of the job's time with the last lines only",
        check=job_tail,
        needs=("limited_by_seconds",),
        sources=("job",),
        limit="tail",
    ),
    Rule(
        id="front",
        title="HTTP front or tokenizer of a server",
        guide="D4",
        threshold=f"event loop {1e3 * MAX_LOOP_LAG_P95_S:.0f} ms late (p95) and "
        f"{1e3 * MAX_LOOP_LAG_P75_S:.0f} ms (p75)",
        check=front_bound,
        needs=("event_loop_lag_p95_s",),
        sources=("live",),
        limit="front",
    ),
    Rule(
        id="queue",
        title="queue without a limit",
        guide="C2",
        threshold=f"vLLM without max_num_queued_reqs; a problem with over {MAX_WAITING} waiting. Others: over "
        f"{MAX_WAITING} and {QUEUE_PER_SLOT} x max_num_seqs waiting",
        check=unlimited_queue,
        needs=("[max_num_queued_reqs]",),
        is_moot=lambda seen: seen.engine != "vllm",  # of others, the waiting requests are judged
        sources=("live", "online", "command"),
    ),
)

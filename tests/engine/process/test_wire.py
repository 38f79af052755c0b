from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import MAX_NUM_SEQS, CapacityPolicy, EngineConfig, QueuePolicy
from headrace.engine.checks import RequestChecks
from headrace.engine.core import EngineStats
from headrace.engine.process import wire
from headrace.engine.settings import Choice, Settings
from headrace.histogram import HistogramCounts
from headrace.sched import SchedulerLimits, SchedulerStats
from headrace.startup import StageName, StartupStage
from headrace.types import Readout, Request, SamplingParams, SequenceEvent, SequenceTiming, TokenLogprobs

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
token_ids = st.integers(0, 2**31 - 1)
counts = st.integers(0, 2**62)
int32_arrays = st.lists(token_ids, max_size=20).map(lambda ids: np.array(ids, np.int32))
floats = st.floats(allow_nan=False)
positive = st.integers(1, 1 << 20)


def optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


sampling_params = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.floats(0, 2) | st.floats(0, 2).map(np.float64) | st.just(np.float32(0.5)),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 100) | st.integers(-1, 100).map(np.int64),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    frequency_penalty=st.floats(-2, 2),
    detokenize=st.just(True),
    skip_special_tokens=st.booleans(),
    presence_penalty=st.floats(-2, 2),
    logit_bias=optional(st.dictionaries(token_ids, st.floats(-100, 100), max_size=5)),
    allowed_token_ids=optional(st.lists(token_ids, min_size=1, max_size=5)),
    bad_words_token_ids=st.lists(st.lists(token_ids, min_size=1, max_size=4), max_size=3),
    seed=optional(st.integers(-(2**63), 2**64 - 1)),
    stop=st.lists(texts.filter(bool), max_size=3) | texts.filter(bool),
    stop_token_ids=st.lists(token_ids, max_size=3),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    max_tokens=optional(st.integers(20, 1000)),
    min_tokens=st.integers(0, 20),
    logprobs=optional(st.integers(0, 20)),
    prompt_logprobs=optional(st.integers(0, 20)),
)
readouts = st.builds(Readout, pooling=st.sampled_from([None, "last", "mean"]), targets=optional(int32_arrays))
requests = st.builds(
    Request,
    request_id=texts,
    prompt_token_ids=int32_arrays,
    params=sampling_params,
    priority=st.integers(-(2**63), 2**63 - 1),
    cache_salt=optional(texts),
    watched=st.booleans(),
    announced=st.booleans(),
    readout=optional(readouts),
)
logprobs = st.builds(
    TokenLogprobs,
    token_id=token_ids,
    logprob=floats,
    rank=positive,
    top_token_ids=st.lists(token_ids, max_size=3).map(tuple),
    top_logprobs=st.lists(floats, max_size=3).map(tuple),
)
events = st.builds(
    SequenceEvent,
    request_id=texts,
    index=st.integers(0, 100),
    token_ids=int32_arrays,
    finish_reason=st.sampled_from([None, "stop", "length", "abort"]),
    stop_token_id=optional(token_ids),
    logprobs=optional(st.lists(logprobs, max_size=3).map(tuple)),
    num_cached_tokens=counts,
    error=optional(texts),
    prompt_logprobs=optional(st.lists(st.none() | logprobs, max_size=3).map(tuple)),
    readout=optional(st.lists(floats, max_size=4).map(lambda values: np.array(values, np.float64))),
    timing=optional(st.builds(SequenceTiming, optional(floats), optional(floats), optional(floats), counts)),
)
histograms = st.builds(HistogramCounts, st.lists(counts, max_size=4).map(tuple), floats)
scheduler_stats = st.builds(
    SchedulerStats, num_steps=counts, num_running=counts, batch_tokens=histograms, token_gaps=histograms
)
stats = st.builds(EngineStats, scheduler_stats, floats, floats, floats, counts, histograms, histograms, floats)
limits = st.builds(
    SchedulerLimits,
    max_num_seqs=st.integers(1, 10),
    max_num_batched_tokens=st.integers(1 << 20, 1 << 21),
    max_model_len=positive,
    num_blocks=positive,
    enable_prefix_caching=st.booleans(),
    queue_policy=st.sampled_from(get_args(QueuePolicy)),
    capacity_policy=st.sampled_from(get_args(CapacityPolicy)),
)
engine_settings = st.builds(
    Settings,
    device=texts,
    dtype=texts,
    kv_dtype=texts,
    load_format=st.sampled_from(["auto", "random"]),
    num_threads=positive,
    max_model_len=positive,
    max_num_seqs=positive,
    max_num_batched_tokens=positive,
    block_size=positive,
    num_blocks=positive,
    enable_chunked_prefill=st.booleans(),
    enable_prefix_caching=st.booleans(),
    queue_policy=st.sampled_from(get_args(QueuePolicy)),
    capacity_policy=st.sampled_from(get_args(CapacityPolicy)),
    seed=counts,
    choices=st.lists(st.builds(Choice, texts, texts, texts), max_size=3).map(tuple),
    warnings=st.lists(texts, max_size=2).map(tuple),
    quantization=st.sampled_from([None, "fp8"]),
    full_rate_seqs=optional(positive),
)
checks = st.builds(RequestChecks, limits, st.lists(token_ids, max_size=3).map(tuple), optional(positive))
configs = st.builds(
    EngineConfig,
    model=texts,
    tokenizer=optional(texts),
    dtype=st.sampled_from(["auto", "bfloat16"]),
    max_num_seqs=optional(st.integers(1, MAX_NUM_SEQS)),
    gpu_memory_utilization=optional(st.floats(0.1, 1.0)),
    kv_cache_memory_bytes=optional(st.integers(1, 2**63 - 1)),
    enable_prefix_caching=st.booleans(),
    seed=counts,
)
commands = st.one_of(
    st.builds(wire.Start, configs),
    st.builds(wire.Abort, texts, optional(counts)),
    st.builds(wire.LimitRunning, optional(counts)),
    st.just(wire.ForgetPrefixes()),
    st.just(wire.Close()),
)
stages = st.builds(
    StartupStage, st.sampled_from(get_args(StageName)), counts, counts, optional(st.floats(0, 1e6, allow_nan=False))
)
messages = st.one_of(
    st.builds(wire.Stage, stages),
    st.builds(wire.Ready, engine_settings, checks),
    st.builds(wire.Failed, texts, texts),
    st.builds(wire.Heartbeat, counts, st.booleans()),
)


def assert_same(left: object, right: object) -> None:
    """Equal in value and in type, recursively, arrays included."""
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray) and left.dtype == right.dtype
        assert left.tolist() == right.tolist()
    elif isinstance(left, np.generic):
        assert left.item() == right
    elif isinstance(left, msgspec.Struct):
        assert type(left) is type(right)
        for name in left.__struct_fields__:
            assert_same(getattr(left, name), getattr(right, name))
    elif dataclasses.is_dataclass(left):
        assert type(left) is type(right)
        for field in dataclasses.fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, tuple | list):
        assert type(left) is type(right) and len(left) == len(right)  # type: ignore[arg-type]
        for one, other in zip(left, right, strict=True):  # type: ignore[call-overload]
            assert_same(one, other)
    else:
        assert type(left) is type(right) and left == right


@given(requests)
def test_a_request_arrives_as_it_was_sent(request: Request) -> None:
    command = wire.decode_command(wire.encode(wire.submission(request)))
    assert isinstance(command, wire.Submit) and command.request_id == request.request_id
    assert_same(request, wire.request_of(command))


@given(st.lists(st.lists(events, max_size=6), max_size=3), optional(stats))
@settings(max_examples=60)
def test_steps_arrive_as_they_were_sent(steps: list[list[SequenceEvent]], counters: EngineStats | None) -> None:
    writer, reader = wire.StepWriter(), wire.StepReader()
    for sent in steps:
        step = wire.decode_message(wire.encode(writer.step(sent, counters)))
        assert isinstance(step, wire.Step)
        assert_same(sent, reader.events(step))
        assert_same(counters, step.stats)


@given(commands)
def test_commands_arrive_as_they_were_sent(command: wire.Command) -> None:
    assert_same(command, wire.decode_command(wire.encode(command)))


@given(messages)
def test_messages_arrive_as_they_were_sent(message: wire.EngineMessage) -> None:
    assert_same(message, wire.decode_message(wire.encode(message)))


def test_infinite_log_probabilities_arrive() -> None:
    event = SequenceEvent("a", 0, np.empty(0, np.int32), logprobs=(TokenLogprobs(1, -math.inf, 1),))
    (arrived,) = wire.StepReader().events(wire.StepWriter().step([event]))
    assert arrived.logprobs == event.logprobs


def test_received_tokens_are_writable() -> None:
    sent = wire.submission(Request("a", np.arange(3), SamplingParams()))
    request = wire.request_of(sent)
    assert request.prompt_token_ids.flags.writeable


@pytest.mark.parametrize("value", [np.zeros((2, 2)), np.array(["text"]), object()])
def test_a_value_that_cannot_be_encoded_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="not sent"):
        wire.encode(wire.Failed("a", value))  # type: ignore[arg-type]

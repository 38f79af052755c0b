"""The Triton kernels against their reference, on fresh random inputs.

Each test has cases for a GPU, and smaller ones for Triton's interpreter, which runs the same kernels on a CPU.
"""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import reference
from headrace.kernels.layout import RouteRows
from headrace.steps import BROKEN, FULL, STOPPED, UNFINISHED
from tests.kernels.places import (
    SHAPES,
    SMALL_SHAPES,
    Place,
    cases,
    everywhere,
    make_cache,
    make_layout,
    record_compilations,
    relative_error,
)
from tests.kernels.verifications import NUM_SLOTS, Verification


@cases("hidden_size", gpu=[(576,), (2048,), (4096,)], interpreted=[(64,), (200,)])
def test_norms_match_their_references(place: Place, hidden_size: int) -> None:
    from headrace.kernels import gpu

    x = place.randn(37, hidden_size)
    weight = place.randn(hidden_size)
    assert relative_error(gpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < place.error
    residual = torch.randn_like(x)
    other = residual.clone()
    found = gpu.add_rms_norm(x, residual, weight, 1e-5)
    assert relative_error(found, reference.add_rms_norm(x, other, weight, 1e-5)) < place.error
    assert torch.equal(residual, other)


@cases("hidden_size", gpu=[(576,), (2048,), (4608,)], interpreted=[(64,), (200,)])
def test_layer_norms_match_their_references(place: Place, hidden_size: int) -> None:
    from headrace.kernels import gpu

    x = 3 + place.randn(37, hidden_size)
    weight, bias = (torch.randn(hidden_size, device=place.device) for _ in range(2))
    expected = reference.layer_norm(x, weight, bias, 1e-5)
    assert relative_error(gpu.layer_norm(x, weight, bias, 1e-5), expected) < place.error
    residual = torch.randn_like(x)
    other = residual.clone()
    found = gpu.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert relative_error(found, reference.add_layer_norm(x, other, weight, bias, 1e-5)) < place.error
    assert torch.equal(residual, other)


@cases("num_tokens num_chosen hidden_size", gpu=[(16, 8, 2048), (300, 3, 576)], interpreted=[(5, 3, 200), (3, 8, 64)])
def test_a_norm_sums_the_routes_of_each_token_as_a_kernel_before_it_would(
    place: Place, num_tokens: int, num_chosen: int, hidden_size: int
) -> None:
    from headrace.kernels import gpu

    routes = RouteRows(place.randn(num_tokens * num_chosen, hidden_size), num_chosen)
    weight, bias = (torch.randn(hidden_size, device=place.device) for _ in range(2))
    residual = place.randn(num_tokens, hidden_size)
    summed = gpu.sum_routes(routes)
    expected = routes.rows.float().view(num_tokens, num_chosen, hidden_size).sum(1)
    assert relative_error(summed, expected) < place.error
    for norm, parameters in ((gpu.add_rms_norm, (weight,)), (gpu.add_layer_norm, (weight, bias))):
        total, other = residual.clone(), residual.clone()
        found, separate = norm(routes, total, *parameters, 1e-5), norm(summed, other, *parameters, 1e-5)
        assert torch.equal(found, separate) and torch.equal(total, other)


@everywhere
def test_a_norm_reads_rows_that_lie_apart(place: Place) -> None:
    from headrace.kernels import gpu

    wide, weight = place.randn(9, 300), torch.randn(200, device=place.device)
    part = wide[:, 50:250]
    assert relative_error(gpu.rms_norm(part, weight, 1e-5), reference.rms_norm(part, weight, 1e-5)) < place.error


@everywhere
def test_norms_take_weights_in_float32(place: Place) -> None:
    from headrace.kernels import gpu

    x, weight = place.randn(5, 576), torch.randn(576, device=place.device)
    assert relative_error(gpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < place.error


@everywhere
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning:triton")  # numpy's, in the interpreter
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations_match_their_references(place: Place, name: str) -> None:
    from headrace.kernels import gpu

    x = 3 * place.randn(19, 2 * 3000)
    assert relative_error(getattr(gpu, name)(x), getattr(reference, name)(x)) < place.error


@everywhere
def test_the_soft_cap_matches_its_reference_and_works_in_place(place: Place) -> None:
    from headrace.kernels import gpu

    x = 40 * place.randn(7, 5001)
    expected = reference.soft_cap(x.float(), 30.0)
    assert gpu.soft_cap(x, 30.0) is x
    assert relative_error(x, expected) < place.error


@cases(
    "num_heads num_kv_heads head_dim query_lens",
    gpu=[(*shape, [1, 1, 40, 7]) for shape in SHAPES],
    interpreted=[(*shape, [1, 1, 20, 3]) for shape in SMALL_SHAPES],
)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rope_and_store_matches_its_reference(
    place: Place, num_heads: int, num_kv_heads: int, head_dim: int, query_lens: list[int], has_norms: bool
) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, query_lens, [33, 1, 64, 100], 16)
    qkv = place.randn(layout.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    cos_sin = torch.randn(128, head_dim, device=place.device)
    norms = [torch.randn(head_dim, device=place.device) if has_norms else None for _ in range(2)]
    ours, theirs = (make_cache(place, num_blocks, 16, num_kv_heads, head_dim) for _ in range(2))
    theirs.keys.copy_(ours.keys)
    theirs.values.copy_(ours.values)
    expected = reference.rope_and_store(qkv.clone(), layout, cos_sin, theirs, num_heads, num_kv_heads, *norms, 1e-6)
    found = gpu.rope_and_store(qkv.clone(), layout, cos_sin, ours, num_heads, num_kv_heads, *norms, 1e-6)
    assert relative_error(found, expected) < place.error
    assert relative_error(ours.keys, theirs.keys) < place.error
    assert torch.equal(ours.values, theirs.values)


@cases(
    "vocab_size num_rows tolerance",
    gpu=[(1000, 4096, 0.04), (49_152, 4096, 0.04), (128_256, 4096, 0.04)],
    interpreted=[(1000, 40, 0.2), (9000, 40, 0.2)],
)
def test_sampling_follows_the_probabilities(place: Place, vocab_size: int, num_rows: int, tolerance: float) -> None:
    from headrace.kernels.gpu.sample import sample

    logits = torch.full((num_rows, vocab_size), -80.0, device=place.device, dtype=place.dtype)
    chosen = torch.tensor([3, vocab_size // 2, vocab_size - 1], device=place.device)
    wanted = torch.tensor([0.2, 0.5, 0.3], device=place.device)
    logits[:, chosen] = (wanted.log() * 2.0).to(place.dtype)  # temperature 2 brings them back
    slots = torch.arange(num_rows, device=place.device, dtype=torch.int32)
    sampled = torch.empty(num_rows, device=place.device, dtype=torch.int64)
    flags = torch.empty(num_rows, device=place.device, dtype=torch.uint8)
    lens = torch.full((num_rows,), 7, device=place.device, dtype=torch.int64)
    temperature = torch.full((num_rows,), 2.0, device=place.device, dtype=torch.float64)
    seed = torch.arange(num_rows, device=place.device, dtype=torch.int64)
    sample(logits, slots, lens, temperature, seed, sampled, flags)
    shares = torch.stack([(sampled == token).float().mean() for token in chosen])
    assert (shares - (logits[0, chosen].float() / 2.0).softmax(0)).abs().max() < tolerance
    assert not flags.any()
    num_rows //= 5
    logits, slots, sampled, flags = logits[:num_rows], slots[:num_rows], sampled[:num_rows], flags[:num_rows]
    sample(logits, slots, lens, torch.zeros_like(temperature), seed, sampled, flags)
    assert (sampled == vocab_size // 2).all()
    logits[5, 9] = float("nan")
    sample(logits, slots, lens, temperature, seed, sampled, flags)
    assert flags.nonzero().flatten().tolist() == [5]


@everywhere
def test_sampling_uses_the_random_numbers_of_seed_and_length(place: Place) -> None:
    from headrace.kernels.gpu.sample import sample
    from headrace.kernels.gpu.thresholds import CHUNK
    from headrace.sampling.philox import philox

    seeds = [0, 1, -1, 12345, 2**31, -(2**63), 2**63 - 1, 0x1234_5678_9ABC_DEF0]
    seed = torch.tensor(seeds * 4, device=place.device)
    lens = torch.tensor([1, 2, 2000, 2**40 + 3], device=place.device).repeat_interleave(len(seeds))
    zero = torch.zeros_like(seed)
    counter, key = (
        (lens & 0xFFFFFFFF, lens >> 32, zero, zero),
        (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF),
    )
    words = philox(counter, key)
    # Half of the weight is in each of two chunks, and half of a chunk's in each of two tokens.
    expected = torch.where(words[0] < 2**31, 0, CHUNK) + torch.where(words[2] < 2**31, 7, 4000)
    logits = torch.full((len(seed), 2 * CHUNK), -100.0, device=place.device, dtype=place.dtype)
    logits[:, [7, 4000, CHUNK + 7, CHUNK + 4000]] = 3.0
    order = torch.randperm(len(seed)).int().to(place.device)  # a slot samples the same in any row of a batch
    sampled = torch.empty(len(seed), device=place.device, dtype=torch.int64)
    flags = torch.empty(len(seed), device=place.device, dtype=torch.uint8)
    sample(logits, order, lens, torch.ones(len(seed), device=place.device, dtype=torch.float64), seed, sampled, flags)
    assert torch.equal(sampled, expected[order.long()])


@everywhere
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning:triton")  # numpy's, of inf - inf in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_flagged_and_sample_nothing(place: Place, bad: float) -> None:
    from headrace.kernels.gpu.sample import sample

    logits = place.randn(4, 5000)
    logits[1, 4500] = bad
    logits[2] = float("-inf")
    slots = torch.arange(4, device=place.device)
    lens, seed = torch.zeros_like(slots), torch.zeros_like(slots)
    sampled = torch.empty(4, device=place.device, dtype=torch.int64)
    flags = torch.empty(4, device=place.device, dtype=torch.uint8)
    for value in (0.0, 1.0):
        temperature = torch.full((4,), value, device=place.device, dtype=torch.float64)
        sample(logits, slots, lens, temperature, seed, sampled, flags)
        assert flags.tolist() == [0, BROKEN, BROKEN, 0]
        assert sampled[1:3].tolist() == [0, 0]


@everywhere
def test_a_decode_step_is_prepared_from_the_slots(place: Place) -> None:
    from headrace.kernels.gpu.slots import prepare_decode

    num_rows, max_len, block_size = 100, 64, 16
    slots = torch.randperm(num_rows)[:70].int().to(place.device)  # more than one program's
    tokens = torch.randint(1000, (num_rows, max_len), device=place.device).int()
    computed = torch.randint(max_len, (num_rows,), device=place.device)
    tables = torch.randperm(num_rows * max_len // block_size).view(num_rows, -1).int().to(place.device)
    token_ids, context_lens = (torch.empty(70, dtype=torch.int32, device=place.device) for _ in range(2))
    positions, slot_mapping = (torch.empty(70, dtype=torch.int64, device=place.device) for _ in range(2))
    prepare_decode(slots, tokens, computed, tables, block_size, token_ids, positions, slot_mapping, context_lens)
    at = computed[slots.long()]
    assert torch.equal(positions, at)
    assert torch.equal(context_lens, at.int() + 1)
    assert torch.equal(token_ids, tokens[slots.long(), at])
    assert torch.equal(slot_mapping, tables[slots.long(), at // block_size].long() * block_size + at % block_size)


@everywhere
@pytest.mark.parametrize("advances", [False, True])
def test_sampled_tokens_are_appended_to_the_slots_that_go_on(place: Place, advances: bool) -> None:
    from headrace.kernels.gpu.slots import append_tokens

    num_rows, max_len = 100, 64
    slots = torch.randperm(num_rows)[:70].to(place.device)
    sampled = torch.randint(1000, 2000, (70,), device=place.device)
    flags = torch.zeros(70, dtype=torch.uint8, device=place.device)
    tokens = torch.randint(1000, (num_rows, max_len), device=place.device).int()
    lens = torch.randint(1, max_len - 1, (num_rows,), device=place.device)
    is_finished = torch.zeros(num_rows, dtype=torch.bool, device=place.device)
    end_len = torch.full((num_rows,), max_len, device=place.device)
    stops = torch.full((num_rows, 4), -1, device=place.device)
    stops[slots[1], 2] = sampled[1]
    end_len[slots[2]] = lens[slots[2]] + 1
    flags[3] = BROKEN
    is_finished[slots[4]] = True
    stops[slots[5], 0], end_len[slots[5]], flags[5] = sampled[5], 1, BROKEN
    stops[slots[6], 3], end_len[slots[6]] = sampled[6], 1
    lens[slots[7]] = max_len  # a full slot: nothing may be written past its end
    expected_states = [UNFINISHED, STOPPED, FULL, BROKEN, UNFINISHED, BROKEN, STOPPED, FULL, *[UNFINISHED] * 62]
    expected_tokens, expected_lens, expected_finished = tokens.clone(), lens.clone(), is_finished.clone()
    for row, slot in enumerate(slots.tolist()):
        if is_finished[slot]:
            continue
        if lens[slot] < max_len:
            expected_tokens[slot, lens[slot]] = sampled[row].int()
        expected_lens[slot] += 1
        expected_finished[slot] = expected_states[row] != UNFINISHED
    computed = torch.arange(num_rows, device=place.device)
    expected_computed = computed + (expected_lens - lens) * advances

    out = torch.empty(2, 70, dtype=torch.int32, device=place.device)
    append_tokens(
        slots.int(),
        sampled,
        flags,
        tokens,
        lens,
        is_finished,
        end_len,
        stops,
        out,
        advances=computed if advances else None,
    )
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(lens, expected_lens)
    assert torch.equal(is_finished, expected_finished)
    assert torch.equal(computed, expected_computed)
    had_not_ended = [i for i in range(70) if i != 4]
    assert out[0, had_not_ended].tolist() == sampled[had_not_ended].tolist()
    assert out[1, had_not_ended].tolist() == [expected_states[i] for i in had_not_ended]


@cases("width", gpu=[(576,), (4096,)], interpreted=[(8,), (1100,)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_lookup_picks_rows_of_a_table(place: Place, width: int, dtype: torch.dtype) -> None:
    from headrace.kernels import gpu

    table = place.randn(10, width + 8)[:, :width]  # part of a wider one
    token_ids = torch.tensor([3, 3, 9, 0], device=place.device, dtype=dtype)
    assert torch.equal(gpu.embed(token_ids, table), reference.embed(token_ids, table))
    assert gpu.embed(token_ids[:0], table).shape == (0, width)


@everywhere
def test_results_of_steps_go_to_the_places_of_a_ring_in_turn(place: Place) -> None:
    from headrace.kernels.gpu.slots import RING_PLACES, append_tokens

    first_turn, width, num_steps = 2**31 - 3, 4, RING_PLACES + 5  # turns overflow
    ring = torch.full((RING_PLACES, 2 * width + 1), -7, dtype=torch.int32, pin_memory=place.device == "cuda")
    turn = torch.tensor([first_turn], dtype=torch.int32, device=place.device)
    slots = torch.tensor([2, 0, 1], device=place.device).int()
    tokens = torch.zeros((3, 64), dtype=torch.int32, device=place.device)
    lens = torch.ones(3, dtype=torch.int64, device=place.device)
    sampled = torch.randint(1000, (num_steps, 3), device=place.device)
    states = torch.zeros(3, dtype=torch.uint8, device=place.device), torch.zeros(3, dtype=torch.bool)
    for step in range(num_steps):
        append_tokens(
            slots,
            sampled[step],
            states[0],
            tokens,
            lens,
            states[1].to(place.device),
            torch.full((3,), 64, device=place.device),
            torch.full((3, 1), -1, device=place.device),
            ring,
            advances=None,
            turn=turn,
        )
    if place.device == "cuda":
        torch.cuda.synchronize()
    for step in range(num_steps - RING_PLACES, num_steps):
        found = ring[(first_turn + step) % RING_PLACES]
        assert found[:3].tolist() == sampled[step].tolist()
        assert found[width : width + 3].tolist() == [UNFINISHED] * 3
        assert (int(found[-1]) - first_turn - step) % 2**32 == 0
        assert found[3] == found[width + 3] == -7  # no sequences


@everywhere
def test_the_rows_of_drafts_are_prepared_one_after_the_other(place: Place) -> None:
    from headrace.kernels.gpu.slots import prepare_decode

    slots, offsets = torch.tensor([[2, 2, 2, 0], [0, 1, 2, 0]], device=place.device).int().unbind()
    tokens = torch.randint(1000, (3, 64), device=place.device).int()
    computed = torch.tensor([5, 9, 14], device=place.device)
    tables = torch.randperm(12, device=place.device).view(3, 4).int()
    token_ids, context_lens = (torch.empty(4, dtype=torch.int32, device=place.device) for _ in range(2))
    positions, mapping = (torch.empty(4, dtype=torch.int64, device=place.device) for _ in range(2))
    prepare_decode(slots, tokens, computed, tables, 16, token_ids, positions, mapping, context_lens, offsets)
    assert positions.tolist() == [14, 15, 16, 5]
    assert context_lens.tolist() == [15, 16, 17, 6]
    assert torch.equal(token_ids, tokens[slots.long(), positions])
    assert torch.equal(mapping, tables[slots.long(), positions // 16].long() * 16 + positions % 16)

    before = tokens.clone()
    drafts = torch.tensor([7, 8, -1, 9], device=place.device).int()  # the host has one, a draft model put the next
    prepare_decode(slots, tokens, computed, tables, 16, token_ids, positions, mapping, context_lens, offsets, drafts)
    before[2, 15] = 8
    assert torch.equal(tokens, before)
    assert token_ids.tolist() == [before[2, 14], 8, before[2, 16], before[0, 5]]


@everywhere
def test_drafts_are_accepted_as_in_the_reference(place: Place) -> None:
    from headrace.kernels.gpu.slots import accept_drafts

    step = Verification.random()
    nums, states = (list(each) for each in zip(*step.expected(), strict=True))
    assert set(nums) >= {1, 2, 3}
    row_slots = step.slots.repeat_interleave(step.num_rows)
    counts = torch.zeros_like(step.sampled)
    counts[step.first_rows] = step.num_rows
    state = [each.to(place.device) for each in (step.tokens.clone(), step.lens.clone(), step.lens - 1)]
    ended = torch.zeros(NUM_SLOTS, dtype=torch.bool, device=place.device)
    out = torch.zeros(3, len(row_slots), dtype=torch.int32, device=place.device)
    inputs = [each.to(place.device) for each in (row_slots.int(), counts.int(), step.sampled, step.flags)]
    accept_drafts(*inputs, *state, ended, step.end_len.to(place.device), step.stops.to(place.device), out)
    assert out[0].tolist() == step.sampled.tolist()
    assert out[1, step.first_rows].tolist() == states
    assert out[2, step.first_rows].tolist() == nums
    for slot, first, num, end in zip(step.slots.tolist(), step.first_rows.tolist(), nums, states, strict=True):
        start = int(step.lens[slot])
        assert state[1][slot] == start + num and state[2][slot] == start - 1 + num
        assert state[0][slot, start : start + num].tolist() == step.sampled[first : first + num].tolist()
        assert bool(ended[slot]) == (end != UNFINISHED)


@everywhere
def test_new_blocks_are_written_into_the_tables(place: Place) -> None:
    from headrace.kernels.gpu.slots import write_tables

    tables = torch.zeros(5, 7, device=place.device, dtype=torch.int32)
    expected = tables.clone()
    writes = [(0, 0, 9), (4, 6, 8), (2, 3, 7)]
    slots, indexes, blocks = (
        torch.tensor(column, device=place.device, dtype=torch.int32) for column in zip(*writes, strict=True)
    )
    write_tables(tables, slots, indexes, blocks)
    expected[slots.long(), indexes.long()] = blocks
    assert torch.equal(tables, expected)


@everywhere
def test_sequences_enter_their_slots(place: Place) -> None:
    from headrace.kernels.gpu.slots import enter_slot

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 99, (7, 2600), generator=generator, dtype=torch.int32)
    lens = torch.randint(0, 99, (7,), generator=generator)
    computed, is_finished = lens // 2, torch.ones(7, dtype=torch.bool)
    prompts = [torch.randint(0, 99, (n,), generator=generator, dtype=torch.int32) for n in (1, 2500, 1024)]
    slots, starts, num_computed = [5, 0, 3], [0, 1, 2501], [0, 48, 1023]
    columns = torch.tensor([slots, [len(p) for p in prompts], num_computed, starts], dtype=torch.int32)
    on_device = [x.to(place.device) for x in (columns, torch.cat(prompts), tokens, lens, computed, is_finished)]
    for slot, prompt, number in zip(slots, prompts, num_computed, strict=True):
        tokens[slot, : len(prompt)] = prompt
        lens[slot], computed[slot], is_finished[slot] = len(prompt), number, False
    enter_slot(on_device[0], on_device[1], 2500, *on_device[2:])
    for got, expected in zip(on_device[2:], (tokens, lens, computed, is_finished), strict=True):
        assert torch.equal(got.cpu(), expected)


@pytest.mark.gpu
def test_no_number_of_writes_needs_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling a kernel takes half a second, in which the GPU would idle."""
    from headrace.kernels.gpu import slots as slot_kernels

    compiled = record_compilations(monkeypatch)
    for num_writes in (3, 1, 16, 1000, 1024):
        tables = torch.zeros(8, 2048, device="cuda", dtype=torch.int32)
        indexes = torch.arange(num_writes, device="cuda", dtype=torch.int32)
        slot_kernels.write_tables(tables, torch.full_like(indexes, 3), indexes, indexes + 1)
        assert torch.equal(tables[3, :num_writes], indexes + 1)
    assert compiled.count("_write_tables") <= 1  # none, if another test has compiled it

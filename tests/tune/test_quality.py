from __future__ import annotations

from headrace.tune.quality import agreement_of


def test_tokens_agree_up_to_the_first_difference() -> None:
    found = agreement_of("fp8", [["a", "b", "c", "d"], ["x", "y"]], [["a", "b", "z", "d"], ["x", "y"]])
    assert found.agreement == 4 / 6
    assert (found.num_tokens, found.num_prompts) == (6, 2)


def test_a_shorter_answer_does_not_agree_where_it_has_ended() -> None:
    assert agreement_of("fp8", [["a", "b"]], [["a"]]).agreement == 0.5


def test_no_tokens_agree_wholly() -> None:
    assert agreement_of("fp8", [[]], [[]]).agreement == 1.0

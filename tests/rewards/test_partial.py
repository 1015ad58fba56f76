"""The partial reward is the share of the gold answer's characters that stand in their places."""

import pytest

from perl.rewards import partial_answer_reward


@pytest.mark.parametrize(
    ("answer", "gold", "left", "right"),
    [
        ("402913", "402913", 1, 1),
        ("402900", "402913", 4 / 6, 4 / 6),
        ("40 29 00", "402913", 4 / 6, 4 / 6),  # spaces do not count
        ("02913", "402913", 0, 5 / 6),  # the first digit is missing
        ("4029131", "402913", 6 / 7, 0),  # one is too many: nothing is won by writing on
        ("319204", "402913", 0, 0),
        ("", "402913", 0, 0),
        ("0.50", "0.5", 3 / 4, 0),
    ],
)
def test_the_share_is_that_counted_by_hand_from_either_end(answer, gold, left, right):
    completion = [f"so \\boxed{{{answer}}}"]
    assert partial_answer_reward(completion, [gold]) == pytest.approx([left])
    assert partial_answer_reward(completion, [gold], align="right") == pytest.approx([right])


def test_the_answer_is_found_as_by_the_verifier_and_without_a_gold_answer_there_is_no_reward():
    said = ["\\boxed{11}, no: \\boxed{12}", "<think>\\boxed{12}", "The answer is 12.", "twelve", "\\boxed{12}"]
    golds = ["12", "12", "so 12 #### 12", "12", None]
    found = partial_answer_reward(said, golds)
    assert found[:4] == pytest.approx([1, 0, 1, 0])
    assert found[4] is None
    chats = [[{"role": "assistant", "content": text}] for text in said]
    assert partial_answer_reward(chats, golds) == found
    assert partial_answer_reward([], []) == []


def test_another_end_to_count_from_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="no align 'rihgt': did you mean right"):
        partial_answer_reward([], [], align="rihgt")

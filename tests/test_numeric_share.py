"""How many tests compare numbers with an independent computation does not fall."""

import ast

import pytest

from tests import count_numeric

FLOOR = 0.4


def test_the_share_of_numeric_tests_does_not_fall():
    assert count_numeric.share() >= FLOOR


NUMERIC = [
    "from tests.oracles.losses import loss\ndef test_a():\n    assert ours() == loss()",
    "def test_a():\n    torch.testing.assert_close(x, y)",
    "def test_a():\n    assert x == pytest.approx(3)",
    "def test_a():\n    assert (a - b).abs().max() <= 1e-6",
    "def test_a():\n    assert torch.equal(one, other)",
    "def test_a():\n    expected = sum(x * y for x, y in pairs)\n    assert dot(pairs) == expected",
    "def test_a():\n    assert area(w, h) == w * h",
    "import torch\ndef test_a():\n    assert scale(forward(x)) == forward(scale(x))",
    "def near(a, b):\n    assert abs(a - b) < 1e-3\ndef test_a():\n    near(f(), 2.0)",
    "@pytest.fixture\ndef checked():\n    assert math.isclose(a, b)\ndef test_a(checked):\n    pass",
]
NOT_NUMERIC = [
    "def test_a():\n    assert f(2) == 4",
    "def test_a():\n    assert name(x) == 'a' + suffix(x)",
    "def test_a():\n    assert folder / 'a' == found",
    "def test_a():\n    assert len(found) == len(given) + 1",
    "def test_a():\n    assert len(found) == 2 * len(given)",
    "def test_a():\n    assert str(a) == str(b)",
    "def test_a():\n    assert loss < 1.0",
    "def test_a():\n    assert sum(1 for line in lines) == 3",
    "def test_a():\n    assert not torch.equal(a, b)",
    "def test_a():\n    assert f(x) == g(x)",
]


@pytest.mark.parametrize(("text", "numeric"), [*((text, 1) for text in NUMERIC), *((text, 0) for text in NOT_NUMERIC)])
def test_what_counts(text, numeric):
    ast.parse(text)
    assert count_numeric.count(text) == (1, numeric)

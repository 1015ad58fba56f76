r"""What looks alike is spelt alike, what differs is not, and the time is linear in the length."""

import pytest

from perl.rewards.verifier.latex import compact, tidy


@pytest.mark.parametrize(
    "spellings",
    [
        [
            r"\frac{1}{2}",
            r"\dfrac12",
            r"\tfrac 1 2",
            r"\cfrac{1} {2}",
            r"$\frac12$",
            "\u00bd",
            r"\displaystyle\frac{1}{2}.",
        ],
        [r"\sqrt{3}", r"\sqrt3", r"\sqrt 3", r"\sqrt(3)", "\u221a3", "\u221a(3)", "sqrt(3)"],
        [r"\frac{\sqrt{2}}{\sqrt{3}}", r"\frac\sqrt2\sqrt3", r"\dfrac{\sqrt2}{\sqrt 3}"],
        [r"\sqrt{\frac{1}{2}}", r"\sqrt\frac12", r"\sqrt{\tfrac12}"],
        [r"\sqrt[3]{8}", r"\sqrt[3]8", r"\sqrt[3] 8"],
        ["45", r"45^\circ", r"45^{\circ}", "45\u00b0", "45 degrees", r"45\degree"],
        [r"\sin(\frac{30\pi}{180})", r"\sin 30^\circ", r"\sin(30^{\circ})", "\\sin 30\u00b0"],
        ["50%", r"50\%", "50 percent", r"50\text{ percent}", "50\uff05"],
        [r"2\cdot 3", r"2\times3", "2*3", "2\u00d73", r"2 \cdot 3"],
        ["2^3", "2**3"],
        [r"x\leq 5", r"x \le 5", "x<=5", "x\u22645", r"x \leqslant 5"],
        ["10,080", r"10,\!080", r"10{,}080"],
        ["12345", r"12\,345", r"12\;345"],
        [r"5\cdot 10^{6}", "5 million", r"5\text{ million}", r"5\times10^{6}"],
        ["(1,2)", r"\left( 1, 2 \right)", r"\bigl(1,2\bigr)", "\uff081\uff0c2\uff09"],
        [r"\{1,2\}", r"\left\{1,2\right\}", r"\lbrace 1,2 \rbrace"],
        [r"\emptyset", r"\varnothing", r"\{\}", r"\{ \}"],
        [r"(-\infty,\infty)", r"\mathbb{R}", r"\mathbb R", r"\text{all real numbers}", "(-inf, inf)"],
        [r"\text{cm}", r"\mathrm{ cm }", r"\mbox{cm}"],
        ["5.5", r"\$5.5", "$5.5$", "\u20ac5.5", r"\(5.5\)", r"\[5.5\]", "= 5.5", "5.5,"],
    ],
    ids=lambda spellings: spellings[0],
)
def test_one_spelling(spellings):
    assert {compact(tidy(spelling)) for spelling in spellings} == {compact(tidy(spellings[0]))}


def test_every_argument_is_in_braces_however_deep():
    assert tidy("\\sqrt" * 300 + "2") == "\\sqrt{" * 300 + "2" + "}" * 300
    assert tidy("\u221a" * 300) == "\u221a" * 300  # signs that grow many times are no answer
    assert tidy(r"\frac" * 3 + "1234") == r"\frac{\frac{\frac{1}{2}}{3}}{4}"

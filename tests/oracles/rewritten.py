r"""Formulas with what they are worth, and formulas that SymPy rewrites: the same ones, and ones with a term more.

draw -> (LaTeX, function of x); draw -> (LaTeX, LaTeX, whether they are the same)
"""

import math
import random
from collections.abc import Callable, Iterator

import sympy

Formula = tuple[str, Callable[[float], float]]

_X, _Y = sympy.symbols("x y")
_REWRITE = (sympy.expand, sympy.factor, sympy.together, lambda e: sympy.apart(e, _X), sympy.cancel)


def random_formula(draw: random.Random, depth: int) -> Formula:
    """Sums, products, fractions, powers, roots and absolute values, each written beside what Python computes."""
    if depth == 0 or draw.random() < 0.15:
        number = draw.randint(1, 9)
        return ("x", lambda x: x) if draw.random() < 0.6 else (str(number), lambda _: float(number))
    (one, f), (two, g) = random_formula(draw, depth - 1), random_formula(draw, depth - 1)
    return draw.choice(
        [
            (f"{one}+{two}", lambda x: f(x) + g(x)),
            (f"{one}-({two})", lambda x: f(x) - g(x)),
            (f"({one})({two})", lambda x: f(x) * g(x)),
            (f"\\frac{{{one}}}{{1+({two})^2}}", lambda x: f(x) / (1 + g(x) ** 2)),
            (f"({one})^{{3}}", lambda x: f(x) ** 3),
            (f"\\sqrt{{1+({one})^2}}", lambda x: math.sqrt(1 + f(x) ** 2)),
            (f"|{one}|", lambda x: abs(f(x))),
        ]
    )


def rewritten_pairs(number: int, seed: int) -> Iterator[tuple[str, str, bool]]:
    """Rational functions of x and y, with a root, sine or exponential in every second one."""
    draw = random.Random(seed)
    for row in range(number):
        factors = [_linear(draw) for _ in range(draw.randint(2, 3))]
        formula = sympy.Mul(*factors) / draw.choice([1, _linear(draw), _linear(draw) ** 2])
        if row % 2:
            formula += draw.choice([sympy.sqrt(_X**2 + 1), sympy.sin(_X) ** 2, sympy.exp(_X), sympy.sqrt(2)])
        same = draw.random() < 0.5
        changed = formula if same else formula + draw.choice([1, -1, _X, _Y, sympy.Rational(1, 7)])
        rewrite = _REWRITE[1] if row % 2 else draw.choice(_REWRITE)  # apart and cancel are for rational functions
        yield sympy.latex(formula), sympy.latex(rewrite(changed)), same


def _linear(draw: random.Random) -> sympy.Expr:
    return draw.randint(1, 5) * draw.choice([_X, _X, _Y]) + draw.choice([-1, 1]) * draw.randint(1, 9)

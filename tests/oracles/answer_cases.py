r"""Pairs of a gold answer and an answer that anybody can judge, by kind, and random expressions whose value is known.

Written by hand and by a few lines of arithmetic on coefficients; no computer algebra, nothing of the package.
"""

import random
import re
from fractions import Fraction

Pair = tuple[str, str]

UNITS = (
    r"\text{ %s}",
    r"\mathrm{~%s}",
    r"\,\mathrm{%s}",
    r"\text{ %s}^{-1}",
    r"\mathrm{~%s^{-1}}",
    r"\mathrm{kg} \cdot \mathrm{%s}",
)

# "# kind", and below it "gold answer == the same | again the same != nearly | nearly too".
TABLE = r"""
# integers
42 == 42 | +42 != 43 | -42
-7 == $-7$
0 == -0
17 == 17.
-3 == \u22123
12 == \left(12\right) != 1, 2
204 == \text{204} | \underline{204}
9007199254740993 == 9,007,199,254,740,993 != 9007199254740992
7 != 77
100 != 10 | 10 0
6 != 9
34 != 3 4
-5 != - - 5
57 != 5 + 7
5 != 1/0 | 0/0 | 5/0.0
5/0.0 != 5
# numbers side by side
5 6 == 5 \quad 6
[5 6] == [5 6] != 11
20 == 2\binom{5}{2}
60 == \binom{5}{2}\binom{4}{2}
x+12 == 3(4)+x
6x == (2)(3)x
5 == {5}
96 != 45 51 | 45\quad 51 | 45\ 51 | 45\,\,51 | 45}{51 | 45\}\{51 | 45] [51 | {45}{51} | \{45\}\{51\}
6 != 1 2 3
-3 != -1 2
3 != [1 2]
7 != (3) 4
9 6 != 15 | 6 9
x+3 != x+1 2
12 != 2\binom{5}{2}
# fractions
1/2 == \frac{1}{2} != -1/2
\frac{1}{2} == \dfrac12 != \frac{2}{1}
\frac{3}{4} == \tfrac{6}{8} != \frac{4}{3}
-1/2 == \frac{-1}{2}
-\frac{1}{2} == \frac{1}{-2}
\frac{10}{5} == 2
\frac 1 3 == 1/3
\cfrac{7}{9} == 7 / 9
1/3 != 0.33
\frac{22}{7} != \pi
11/2 != 1 1/2
\frac{1}{23} != \frac12 3
# decimals
0.5 == .5 | 0.50 != 0.05
3.25 == 13/4 != 3.26
-1.5 == -\frac{3}{2}
4.5e33 == 4.5 \times 10^{33}
1/3 == 0.333333 | 0.3333333333333333 | 0.\bar{3} | 0.333\ldots != 0.33333 | 0.333334 | 0.\bar{4}
2/3 == 0.666667 | 0.666666 != 0.666668
\frac{1}{3} == 0.\overline{3} != 0.\overline{4}
\frac{1}{6} == 0.1\overline{6}
1/6 == 0.1666...
0.001 == 10^{-3}
\sqrt{2} == 1.414214 != 1.414
0.333 != 0.333\ldots
1000000 != 1000000.5
0.1 != 0.10000000000000001 | 0.1000000000000000055511151231257827
# percentages
50% == 50% | 1/2 | 50 | 0.5 | \frac{1}{2} != 5% | 51% | 5 | 500% | 5000%
50 == 50%
1/2 == 50 %
0.5 == 50\% != 5%
12.5% == 1/8
100% == 1 != 1%
1,250% == 12.5
12.5 == 12.5\%
25% == 25 percent != 0.025
0.07 == 7\%
1% != 100%
# units
5 == 5 cm | 5\text{ k}\Omega != 6 cm | 5 million | 5 xy | 5\mathrm{e} | 5\text{ or more}
5 \text{ cm} == 5
12\ \mathrm{cm}^2 == 12 \text{ square centimeters}
60 mph == 60 miles per hour != 60 km/h
10 km == 10 kilometers
\$5.50 == 5.5
3 hours == 3 != 3 minutes
30 minutes == 30\text{ min}
5cm == 5
\frac{3}{4} \text{ cup} == 0.75
1500000 == 1.5 million
24 == 24 apples
5 \text{ m/s} == 5 \mathrm{~m} \mathrm{~s}^{-1}
5 \text{ N} == 5 newtons
25 == 25^\circ\text{C}
9.8 == \text{9.8 J} | 9.8\,\frac{\mathrm{m}}{\mathrm{s}^2} | 9.8\,\tfrac{\mathrm{m}}{\mathrm{s}^2}
9.8 == 9.8\,\dfrac{\mathrm{m}}{\mathrm{s}^2} | 9.8\text{ J}/(\text{kg}\cdot\text{K})
9.8 == 9.8\,\frac{\text{J}}{\text{kg}\cdot\text{K}} | \qty{9.8}{m/s^2} | \num{9.8}
4m == 4 m != 4
-5 == -5\,^\circ\mathrm{F} | -5~^\circ\text{C} | -5\,^\circ C | -5\,{}^\circ\mathrm{C}
41.8 \frac{\text{miles}}{\text{hour}} == 41.8 | 41.8 mph
2 == 2\, \mathrm{M}_\odot | 2\, M_{\odot} | 2\, \AA | 2\, \u00c5
9.8 m/s == \SI{9.8}{\metre\per\second}
3 == \u00a53 | \u20b93 | 3\u00a2 | USD 3
20 == 20 months | 20 square feet | 20 points | 20 paths | 20 pairs of shoes != 20 dozen | 20 thousandths
20 != 20 billionths | 20 tenths | 20 squared | 20 factorial | 20 half | 20 point five | 20 times ten | 20 and a half
20 != 20 divided by four | 20 to the power of three | 20 negative | 20 and thirty | 20 but maybe six | 20 out of 36
20 != 20 over three | 20 twentieths | 20\text{ dozen} | 20\text{ thousandths} | 20\text{ billionths}
20 != 20\text{ tenths} | 20\text{ squared} | 20\text{ factorial} | 20\text{ half} | 20\text{ point five}
20 != 20\text{ times ten} | 20\text{ and a half} | 20\text{ divided by four} | 20\text{ to the power of three}
20 != 20\text{ negative} | 20\text{ and thirty} | 20\text{ but maybe six} | 20\text{ out of 36} | 20\text{ over three}
20 != 20\text{ twentieths}
AB == \mathrm{A}\mathrm{B}
5 cm != 5 m
5 \text{ cm}^2 != 5 \text{ cm}
10 am != 10 pm
12\text{ m}^2 != 12\text{ m}^3
4 != 4m
5\text{ m} != 5\text{ s} | 5\text{ m}^{-1}
100 != 10\,^\circ\mathrm{C}
9.8\,\frac{\text{m}}{\text{s}^2} != 9.8\,\frac{\text{m}}{\text{s}}
2 M_\odot != 2 L_\odot
25^\circ C != 25^\circ F
5\text{ k}\Omega != 5\,\Omega
# degrees
45 == 45^\circ != 54^\circ
45^{\circ} == 45 degrees
90\u00b0 == 90
60^\circ == 60\degree
\frac{1}{2} == \sin 30^\circ != \cos 30^\circ
45^\circ != 46^\circ
90^\circ != 9^\circ
30^\circ != -30^\circ
# thousands
1234 == 1,234 != 1,23 | 12,34 | 1.234
1,234 == 1234
1234567 == 1{,}234{,}567 != 1234,567
12345 == 12\,345
10080 == 10,\!080
1000.5 == 1,000.5
12000\pi == 12{,}000\pi
12000 == 12,000 \text{ km} | x = 12,000
123456 != 1,234,56
123 != ,123
# mixed numbers
3/2 == 1\frac{1}{2}
2\frac34 == 2.75 != 1.5
-3/2 == -1\frac{1}{2}
7/2 == 3 1/2 != 3 1/3
10\frac{2}{5} == 52/5
1/2 != 1\frac{1}{2}
-\frac{1}{2} != -1\frac{1}{2}
11/2 != 1\frac12
# intervals
(1,2] == 1 < x \leq 2 != [1,2]
(5,\infty) == x > 5 | 5 < x != x \geq 5 | x < 5
x \in [0,1) == [0,1)
(-\infty, 3] == x \le 3
(-\infty,1)\cup(3,\infty) == x<1 \text{ or } x>3 | x<1 or x>3 | x<1 \lor x>3 | x<1 \vee x>3 | x<1 \u2228 x>3 != 1<x<3
(-\infty,1)\cup(3,\infty) != x<1 and x>3 | x<1 \text{ and } x>3 | x<1 \land x>3 | x<1 \wedge x>3
\left[\frac12, 2\right] == [0.5,2]
(1,2) == 2 > x > 1 != [1,2] | (1,3)
\mathbb{R} == (-\infty,\infty) | x>1 \text{ or } x<3
\{x \mid x > 2\} == x>2
[1,2]\cup[5,6] == [5,6]\cup[1,2] != [1,2]
(-\infty,0)\cup(0,\infty) == x \neq 0 | \mathbb{R} \setminus \{0\} | x \notin \{0\}
\{x \in \mathbb{R} : x \ne \pm 1\} == \mathbb{R} - \{1,-1\} | x \ne 1, x \ne -1
[1,5] == [1,3]\cup[2,5] | x \geq 1, x \leq 5 | [1;5]
(1,3) == x>1 and x<3 | x>1 \text{ and } x<3 | x>1 \land x<3 | x>1 \wedge x<3 != x>1 or x<3 | x>1 \text{ or } x<3
(1,3) != x>1 \lor x<3 | x>1 \vee x<3 | \{x : x>1 \text{ or } x<3\}
\{x \mid x<1 \text{ or } x>3\} == x>3 or x<1
(-3,3) == |x| < 3
(-3,3] == ]-3,3]
x \neq \sqrt{2} == \mathbb{R}\setminus\{\sqrt2\}
[0,1) != (0,1]
x \in (1,2) != y \in (1,2)
[1,2] != [2,1]
x>1, x<3 != x>1 or x<3 | \mathbb{R}
x>1 and x<3 != x>1 or x<3
(-\infty,-\sqrt2)\cup(\sqrt2,\infty) != x<-\sqrt2 and x>\sqrt2
1<x<3 != 1,3
x \in (1,3) != 1,3
x \neq 0 != \mathbb{R} | y \neq 0
\mathbb{R}\setminus\{0\} != 0
[1,3]\cup(3,5] != [1,3)\cup(3,5]
# sets and lists
\{1,2,3\} == \{3,1,2\} != \{1,2\}
1,2,3 == 3, 2, 1
2 \text{ and } 3 == 3,2
\{1,2\} == 1,2 != \{1,2,3\} | (1,2)
\emptyset == \{\} != 0
x=2 \text{ or } x=3 == 3, 2
\{\sqrt{4}, x+1\} == \{1+x, 2\}
\{1,2\}\cup\{3\} == \{1,2,3\}
\varnothing == \emptyset
1,2 != 1,3
1,1,2 != 1,2,2
12 != 1, 2
1,3 != [1,3] | 1<x<3 | x \in [1,3] | x \in (1,3) | 1 \leq x \leq 3 | x>1, x<3
58,500 != 58<x<500
\pm 3 != [-3,3]
x=1, x=3 != [1,3]
\sqrt2, 3 != \sqrt2 < x < 3
# tuples
(1,2,3) == (1, 2, 3) | z=3, x=1, y=2 != (3,2,1)
(1,2) == 1,2 | x_2=2, x_{1}=1 != (2,1) | (1,2,3)
\left(\frac12, 3\right) == (0.5,3)
x=3,y=4 == (3,4) != (4,3) | x=4,y=3
(2,3) == (x,y)=(2,3) | x=2, y=3 | y=3, x=2 | \begin{cases} y=3 \\ x=2 \end{cases} | \langle 2,3\rangle
y=3, x=2 == (2,3)
(5,2) == n=5, k=2
2,3 == y=3, x=2
(1,2),(3,4) == (3,4),(1,2) != (1,4),(3,2)
(3, \frac{\pi}{2}) == \left( 3, \pi/2 \right) != (3, \pi)
(2,1) != y=2, x=1 | (y=2, x=1)
y=2, x=1 != (2,1)
(3,2,1) != z=3, y=2, x=1
# matrices
\begin{pmatrix}1&2\\3&4\end{pmatrix} == \begin{bmatrix}1 & 2 \\ 3 & 4\end{bmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} != \begin{pmatrix}1&3\\2&4\end{pmatrix}
\begin{pmatrix}1/2\\x+1\end{pmatrix} == \begin{pmatrix}0.5\\1+x\end{pmatrix}
\begin{bmatrix}1&2\end{bmatrix} == \left[\begin{array}{cc}1 & 2\end{array}\right]
\begin{pmatrix}\sqrt{4}\\3\end{pmatrix} == \begin{pmatrix}2\\3\end{pmatrix}
A = \begin{pmatrix}1\\2\end{pmatrix} == \begin{pmatrix}1\\2\end{pmatrix}
\begin{pmatrix}1/2\\x/2\end{pmatrix} == \frac{1}{2}\begin{pmatrix}1\\x\end{pmatrix}
\begin{pmatrix}1/2\\x/2\end{pmatrix} != \frac{1}{3}\begin{pmatrix}1\\x\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} == \begin{pmatrix}1\\[4pt]2\end{pmatrix} != \begin{pmatrix}1&2\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} != \begin{pmatrix}2\\1\end{pmatrix} | \begin{pmatrix}1\\2\\0\end{pmatrix}
\begin{pmatrix}x+1\\2\end{pmatrix} != \begin{pmatrix}x-1\\2\end{pmatrix}
# complex numbers
3+4i == 4i+3 != 3-4i | 5
e^{i\pi} == -1
x^2+1 == (x+i)(x-i)
1+i == \sqrt{2}e^{i\pi/4}
\sqrt{-1} == i
-i == \frac{1}{i}
5 == (1+2i)(1-2i)
i != -i
1 != i^2
x^2-1 != (x+i)(x-i)
2i != 2
6-5i != 5-6i
# words
\text{Evelyn} == evelyn != Eve
\text{no solution} == No Solution != solution
6,7 == \text{6 and 7}
1,2 == \text{1, 2}
20 == \approx 20
18 == Answer: 18 | \text{The answer is } 18
1/2 == 1/2 or 0.5
even == \text{Even} != odd
\text{all real numbers} == \mathbb{R}
Monday == \textbf{MONDAY}. | MONDAY != Mon day
Yes == yes
New  York == new york
gr\u00f6\u00dfer == GR\u00d6SSER
yes != no
ab != aab
5 != five
0 != none
# multiple choice
C == (C) | \text{(C)} | (C) 42 | Option C | \text{Choice (C)} | c | (C) 3 and 4 | C. (x) or (y) != (C) or (D)
C != (C), (D) | (C)(D) | C. or D. | (C) 42 or (D) 43 | C or D | (c) or (d) | Option D | D | (D) C | 42
(C) == C != (C) or (D)
(C) 42 == C
B == \textbf{(B)}\ 12 != AB
(A) == (a) != (B)
D == D. none
A != A) B) C) D) | B
c != C or D
# dates and times
2023-05-01 == 2023-5-1 | May 1, 2023 | \text{1 May 2023} | May 1st 2023 != 2017 | 2016+1 | 2023-05-02 | May 2, 2023
10:30 a.m. == 10:30 AM
10:30\text{ AM} == 10:30 a.m.
9:05 == 09:05
20:34 == 20:34:00
3:4 == 3/4
5:12 == \frac{5}{12}
2017 != 2023-05-01
12:30 != 0.4 | 2/5
0.4 != 12:30
10:30 am != 10:30 pm
5/1/2023 != 5/2023
2023/05/01 != 404.6
# numbers in a text font
540 == \textbf{(540)} | \mathbf{(540)} | \text{( 540 ).} | \textbf{\underline{(540)}} != \textbf{(541)}
540 != \textbf{(C) 540} | \textbf{(C)} | \text{(540 apples) 7}
\textbf{(540)} == 540
-3 == \textbf{(-3)}
1/2 == \mathrm{(1/2)}
(1,2) == \textbf{(1, 2)} != \textbf{(2,1)}
(0,5] == \text{(0, 5]} != \text{(0,5)}
12 != \textbf{(1,2)}
15 != 5\text{(3)}
# roots and powers
2\sqrt{3} == \sqrt{12} != 3\sqrt{2}
\frac{\sqrt3}{3} == \frac{1}{\sqrt{3}}
1024 == 2^{10} != 2^{11}
\sqrt[3]{8} == 2
\sqrt{50} == 5\u221a2
\frac{1+\sqrt5}{2} == \frac12 + \frac{\sqrt{5}}{2} != \frac{1-\sqrt5}{2}
\binom{5}{2} == 10
{5 \choose 2} == 10
3^{-2} == 1/9
120 == 5! != 5!!
10000! == 10000 \cdot 9999!
\sqrt{12} != \sqrt{13}
\sqrt{2} != 2
2^{10} != 20
5! != 121
\pi != 3.14 | 22/7
# plus or minus
1\pm\sqrt{5} == 1+\sqrt5, 1-\sqrt5 != 1+\sqrt5
\pm 3 == 3, -3 != 3
x = 5 \pm 3 == 2, 8
\pm\frac12 == -0.5, 0.5 != -0.5, 0.25
2 \pm i == 2-i, 2+i != 2 \pm 2i
5 \pm 3 != 3, 8
# expressions
(x+1)^2 == x^2+2x+1 != x^2+1
a+b == b+a != a-b
ab == ba | a \cdot b
5xy == 5 xy
\frac{x^2-1}{x-1} == x+1
x^a x^b == x^{a+b}
\ln(2x) == \ln 2 + \ln x != 2 \ln x
\frac{n(n+1)}{2} == \sum_{k=1}^n k
\tan x == \frac{\sin x}{\cos x}
y=2x+3 == 2x+3
f(x)=2x == 2x != f(x)=3x
\frac{a}{b}+c == c+a/b
\pi r^2 == r^2 \pi
|x| == \sqrt{x^2}
\sin^2 x+\cos^2 x == 1
\frac{6}{x} == \frac{(2)(3)}{x}
x+6 == 2(3)+x
x+\frac{7}{3} == 2\frac{1}{3}+x
x != y
R != r
R+r != 2r
2x+3 != 2x+4
a_1 != a_2
x^2 != 2x
\frac{a}{b} != \frac{b}{a}
\sin x != \cos x
\frac{5}{x} != \frac{2(3)}{x}
x+5 != (2)(3)+x
# equations
x=5 == 5 != x=6 | y=5
5 == x = 5
2x+3y=6 == 4x+6y=12 != 2x+3y=7
x^2+y^2=1 == y^2+x^2-1=0 != x^2-y^2=1
y=2x+3 == y-2x=3 != y=3x+2
7 == 2+5=7
x = \infty == \infty
6 == \bar{x}=6 | \hat{y}=6 | x^*=6 | x^{*}=6 | \|v\|=6 | f^{-1}(2)=6 | \textcolor{red}{6} | \color{red}6 | \large 6
6 == 6\checkmark != x^2=6 | x^{-1}=6 | \textcolor{red}{5}
x+y=5 != 5
\bar{z} != z
# inequalities
x>5 == 5<x | x-5>0 != x<5 | x>=5 | y>5
x+y>2 == 2<y+x != x+y<2
x \neq 1 == 1 \neq x != x=1
x \geq 2 == x >= 2 != 2
2x<6 == x<3
-x>3 != x>-3
# bases
1010_2 == 1010 | 1010_{2} != 1011_2 | 10 | 101_2
2A_{16} == 2A_{16}
133_5 == 133_{5} != 133_6
12_3 == 12_3 != 21_3
"""


def _cases() -> dict[str, tuple[list[Pair], list[Pair]]]:
    """Kind -> pairs that are the same answer, pairs that nearly are."""
    found: dict[str, tuple[list[Pair], list[Pair]]] = {}
    for line in re.sub(r"\\u([0-9a-f]{4})", lambda code: chr(int(code[1], 16)), TABLE).strip().split("\n"):
        if line.startswith("# "):
            same, other = found[line.removeprefix("# ")] = [], []
            continue
        gold, *answers = re.split(r" (==|!=|\|) ", line)
        pairs = same
        for sign, answer in zip(answers[::2], answers[1::2], strict=True):
            pairs = other if sign == "!=" else pairs
            pairs.append((gold, answer))
    return found


CASES = _cases()
CASES["units"][0].extend(("41.8", f"41.8 {form % unit}") for unit in "msJKgLNWVTACFhU" for form in UNITS)


def random_pairs(number: int, seed: int) -> list[tuple[str, str, bool]]:
    """Random pairs of expressions, and whether they are the same: polynomials, their factors, fractions, surds."""
    draw = random.Random(seed)
    makers = [_polynomial_pair, _fraction_pair, _surd_pair]
    return [makers[i % len(makers)](draw) for i in range(number)]


def _polynomial_pair(draw: random.Random) -> tuple[str, str, bool]:
    """A product of linear factors, and its coefficients, one of them changed in every second pair."""
    factors = [
        (draw.choice([1, 1, 2, 3]), draw.choice([-1, 1]) * draw.randint(1, 9)) for _ in range(draw.randint(2, 3))
    ]
    coefficients = [1]
    for slope, constant in factors:
        risen = [slope * c for c in coefficients] + [0]
        coefficients = [a + b for a, b in zip(risen, [0, *(constant * c for c in coefficients)], strict=True)]
    same = draw.random() < 0.5
    if not same:
        coefficients[draw.randrange(len(coefficients))] += draw.choice([-1, 1])
    product = "".join(f"({slope}x{constant:+d})" for slope, constant in factors)
    degree = len(coefficients) - 1
    terms = "".join(f"{c:+d}x^{{{degree - i}}}" for i, c in enumerate(coefficients) if c)
    return product, terms.removeprefix("+"), same


def _fraction_pair(draw: random.Random) -> tuple[str, str, bool]:
    """A sum of two fractions, and a reduced fraction."""
    one, two = (Fraction(draw.randint(-30, 30), draw.randint(1, 30)) for _ in range(2))
    total = one + two + draw.choice([0, 0, Fraction(1, 30)])
    text = f"\\frac{{{one.numerator}}}{{{one.denominator}}}+\\frac{{{two.numerator}}}{{{two.denominator}}}"
    return text, f"{total.numerator}/{total.denominator}", total == one + two


def _surd_pair(draw: random.Random) -> tuple[str, str, bool]:
    r"""Times a root, and the root of the product: a \sqrt{b} is \sqrt{a^2 b}."""
    times, under = draw.randint(2, 20), draw.choice([2, 3, 5, 6, 7, 10, 11])
    shift = draw.choice([0, 0, 1])
    return f"{times}\\sqrt{{{under}}}", f"\\sqrt{{{times * times * under + shift}}}", shift == 0


def last_box(text: str) -> str | None:
    r"""The content of the last ``\\boxed{}`` that closes and is not empty, by trying each pair of a box and a brace."""
    found = None
    for start in range(len(text)):
        if text.startswith("\\boxed{", start):
            inside = start + len("\\boxed{")
            for end in range(inside, len(text)):
                content = text[inside:end]
                depths = [content[:i].count("{") - content[:i].count("}") for i in range(len(content) + 1)]
                if text[end] == "}" and depths[-1] == 0 and min(depths) >= 0 and content.strip("{}"):
                    found = content
                    break
    return found


def random_number(draw: random.Random) -> Fraction:
    """A whole number of up to twelve digits, a decimal of up to five places, or a fraction; of either sign."""
    kind, sign = draw.randrange(3), draw.choice([1, -1])
    if kind == 0:
        return Fraction(sign * draw.randint(0, 10 ** draw.randint(1, 12)))
    if kind == 1:
        return Fraction(sign * draw.randint(0, 10**6), 10 ** draw.randint(1, 5))
    return Fraction(sign * draw.randint(1, 999), draw.randint(2, 99))


def ways_to_write(number: Fraction, draw: random.Random) -> list[str]:
    """Different texts that all mean this number."""
    times = draw.randint(1, 9)
    ways = {f"{number.numerator * times}/{number.denominator * times}", f"{number.numerator} / {number.denominator}"}
    ways.add(f"${number.numerator}/{number.denominator}$")
    for digits in range(6):
        if (number * 10**digits).denominator == 1:
            text = with_point(number, digits)
            ways |= {text, text + "0" if digits else text, f" {text} ", f"${text}$", f"{text}."}
            if number >= 0:
                ways.add(f"+{text}")
            if text.startswith("0."):
                ways.add(text[1:])
    if number.denominator == 1:
        ways.add(f"{number.numerator:,}")
    return sorted(ways)


def with_point(number: Fraction, digits: int) -> str:
    """An exact decimal of a fraction whose denominator divides a power of ten."""
    scaled = number * 10**digits
    sign, body = ("-" if scaled < 0 else ""), str(abs(scaled.numerator)).rjust(digits + 1, "0")
    return f"{sign}{body[:-digits]}.{body[-digits:]}" if digits else f"{sign}{body}"


def random_term(draw: random.Random, depth: int) -> tuple[str, Fraction]:
    r"""Sums, differences, products, ``\\frac`` and squares of whole numbers, and what they are worth."""
    if depth == 0 or draw.random() < 0.2:
        number = draw.randint(0, 40)
        return str(number), Fraction(number)
    (one, a), (two, b) = random_term(draw, depth - 1), random_term(draw, depth - 1)
    kind = draw.randrange(5)
    if kind == 0:
        return f"({one}+{two})", a + b
    if kind == 1:
        return f"({one}-{two})", a - b
    if kind == 2:
        return f"({one}\\cdot {two})", a * b
    if kind == 3 and b:
        return f"\\frac{{{one}}}{{{two}}}", a / b
    return f"({one})^{{2}}", a**2


def holds(relation: str, **values: Fraction) -> bool:
    r"""Whether Python finds an inequality of names and numbers true: ``1 < t \\leq 2``."""
    return bool(eval(relation.replace("\\leq", "<=").replace("\\geq", ">="), {}, values))  # noqa: S307


# Completions that neither box an answer nor announce one after their reasoning.
WITHOUT_ANSWER = [
    "",
    " ",
    "42",
    "I do not know",
    r"\boxed{5",
    r"\boxed{}",
    r"write it in \boxed or \boxed{...} or \boxed{\text{your answer}}",
    "boxed{5}",
    r"<think>\boxed{5}</think> well",
    "<think>#### 5</think>",
]

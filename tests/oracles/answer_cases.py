r"""Pairs of a gold answer and an answer that anybody can judge, by kind, and random expressions whose value is known.

Written by hand and by a few lines of arithmetic on coefficients; no computer algebra, nothing of the package.
"""

import random
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

# kind -> pairs that are the same answer, pairs that nearly are
CASES: dict[str, tuple[list[Pair], list[Pair]]] = {
    "integers": (
        [
            ("42", "42"),
            ("42", "+42"),
            ("-7", r"$-7$"),
            ("0", "-0"),
            ("17", "17."),
            ("-3", "\u22123"),
            ("12", r"\left(12\right)"),
            ("204", r"\text{204}"),
            ("204", r"\underline{204}"),
            ("9007199254740993", "9,007,199,254,740,993"),
        ],
        [
            *[("42", "43"), ("42", "-42"), ("7", "77"), ("100", "10"), ("6", "9"), ("34", "3 4"), ("-5", "- - 5")],
            *[("12", "1, 2"), ("57", "5 + 7"), ("100", "10 0"), ("9007199254740993", "9007199254740992")],
            *[("5", "1/0"), ("5", "0/0"), ("5", "5/0.0"), ("5/0.0", "5")],
        ],
    ),
    "numbers side by side": (
        [
            *[("5 6", r"5 \quad 6"), ("[5 6]", "[5 6]"), ("20", r"2\binom{5}{2}"), ("60", r"\binom{5}{2}\binom{4}{2}")],
            *[("x+12", "3(4)+x"), ("6x", "(2)(3)x"), ("5", r"{5}")],
        ],
        [
            *[("96", f"45{between}51") for between in (" ", r"\quad ", r"\ ", r"\,\,", "}{", r"\}\{", "] [")],
            *[
                ("96", "{45}{51}"),
                ("96", r"\{45\}\{51\}"),
                ("6", "1 2 3"),
                ("-3", "-1 2"),
                ("3", "[1 2]"),
                ("7", "(3) 4"),
            ],
            *[("[5 6]", "11"), ("9 6", "15"), ("9 6", "6 9"), ("x+3", "x+1 2"), ("12", r"2\binom{5}{2}")],
        ],
    ),
    "fractions": (
        [
            ("1/2", r"\frac{1}{2}"),
            (r"\frac{1}{2}", r"\dfrac12"),
            (r"\frac{3}{4}", r"\tfrac{6}{8}"),
            ("-1/2", r"\frac{-1}{2}"),
            (r"-\frac{1}{2}", r"\frac{1}{-2}"),
            (r"\frac{10}{5}", "2"),
            (r"\frac 1 3", "1/3"),
            (r"\cfrac{7}{9}", "7 / 9"),
        ],
        [
            (r"\frac{1}{2}", r"\frac{2}{1}"),
            ("1/2", "-1/2"),
            (r"\frac{3}{4}", r"\frac{4}{3}"),
            ("1/3", "0.33"),
            (r"\frac{22}{7}", r"\pi"),
            ("11/2", "1 1/2"),
            (r"\frac{1}{23}", r"\frac12 3"),
        ],
    ),
    "decimals": (
        [
            ("0.5", ".5"),
            ("0.5", "0.50"),
            ("3.25", "13/4"),
            ("-1.5", r"-\frac{3}{2}"),
            ("4.5e33", r"4.5 \times 10^{33}"),
            ("1/3", "0.333333"),
            ("1/3", "0.3333333333333333"),
            ("2/3", "0.666667"),
            ("2/3", "0.666666"),
            (r"\frac{1}{3}", r"0.\overline{3}"),
            (r"\frac{1}{6}", r"0.1\overline{6}"),
            *[("1/3", r"0.\bar{3}"), ("1/3", r"0.333\ldots"), ("1/6", "0.1666...")],
            ("0.001", r"10^{-3}"),
            (r"\sqrt{2}", "1.414214"),
        ],
        [
            ("0.5", "0.05"),
            ("3.25", "3.26"),
            ("1/3", "0.33333"),
            ("1/3", "0.333334"),
            ("2/3", "0.666668"),
            (r"\frac{1}{3}", r"0.\overline{4}"),
            *[("0.333", r"0.333\ldots"), ("1/3", r"0.\bar{4}")],
            (r"\sqrt{2}", "1.414"),
            ("1000000", "1000000.5"),
            ("0.1", "0.10000000000000001"),
            ("0.1", "0.1000000000000000055511151231257827"),
        ],
    ),
    "percentages": (
        [
            ("50%", "50%"),
            ("50%", "1/2"),
            ("50", "50%"),
            ("1/2", "50 %"),
            ("0.5", r"50\%"),
            ("12.5%", "1/8"),
            ("100%", "1"),
            ("1,250%", "12.5"),
            ("50%", "50"),
            ("50%", "0.5"),
            ("50%", r"\frac{1}{2}"),
            ("12.5", r"12.5\%"),
            ("25%", "25 percent"),
            ("0.07", r"7\%"),
        ],
        [
            *[("50%", "5%"), ("50%", "51%"), ("100%", "1%"), ("1%", "100%"), ("0.5", "5%"), ("25%", "0.025")],
            *[("50%", "5"), ("50%", "500%"), ("50%", "5000%")],
        ],
    ),
    "units": (
        [
            ("5", "5 cm"),
            (r"5 \text{ cm}", "5"),
            (r"12\ \mathrm{cm}^2", r"12 \text{ square centimeters}"),
            ("60 mph", "60 miles per hour"),
            ("10 km", "10 kilometers"),
            (r"\$5.50", "5.5"),
            ("3 hours", "3"),
            ("30 minutes", r"30\text{ min}"),
            ("5cm", "5"),
            (r"\frac{3}{4} \text{ cup}", "0.75"),
            ("1500000", "1.5 million"),
            ("24", "24 apples"),
            *[("41.8", rf"41.8 {form % unit}") for unit in "msJKgLNWVTACFhU" for form in UNITS],
            (r"5 \text{ m/s}", r"5 \mathrm{~m} \mathrm{~s}^{-1}"),
            (r"5 \text{ N}", "5 newtons"),
            ("25", r"25^\circ\text{C}"),
            ("5", r"5\text{ k}\Omega"),
            ("9.8", r"\text{9.8 J}"),
            ("4m", "4 m"),
            *[
                ("-5", rf"-5{degrees}")
                for degrees in (r"\,^\circ\mathrm{F}", r"~^\circ\text{C}", r"\,^\circ C", r"\,{}^\circ\mathrm{C}")
            ],
            *[("9.8", rf"9.8\,\{frac}{{\mathrm{{m}}}}{{\mathrm{{s}}^2}}") for frac in ("frac", "tfrac", "dfrac")],
            *[
                ("9.8", r"9.8\text{ J}/(\text{kg}\cdot\text{K})"),
                ("9.8", r"9.8\,\frac{\text{J}}{\text{kg}\cdot\text{K}}"),
            ],
            (r"41.8 \frac{\text{miles}}{\text{hour}}", "41.8"),
            (r"41.8 \frac{\text{miles}}{\text{hour}}", "41.8 mph"),
            *[("2", rf"2\, {mass}") for mass in (r"\mathrm{M}_\odot", r"M_{\odot}", r"\AA", "\u00c5")],
            *[("9.8", r"\qty{9.8}{m/s^2}"), ("9.8", r"\num{9.8}"), ("9.8 m/s", r"\SI{9.8}{\metre\per\second}")],
            *[("3", money) for money in ("\u00a53", "\u20b93", "3\u00a2", "USD 3")],
            *[("20", f"20 {noun}") for noun in ("months", "square feet", "points", "paths", "pairs of shoes")],
            ("AB", r"\mathrm{A}\mathrm{B}"),
        ],
        [
            ("5 cm", "5 m"),
            (r"5 \text{ cm}^2", r"5 \text{ cm}"),
            ("60 mph", "60 km/h"),
            ("10 am", "10 pm"),
            ("3 hours", "3 minutes"),
            ("5", "6 cm"),
            ("5", "5 million"),
            (r"12\text{ m}^2", r"12\text{ m}^3"),
            ("5", "5 xy"),
            *[
                ("4m", "4"),
                ("4", "4m"),
                ("5", r"5\mathrm{e}"),
                ("5", r"5\text{ or more}"),
                (r"5\text{ m}", r"5\text{ s}"),
            ],
            *[
                ("20", rf"20{form % words}")
                for form in (" %s", r"\text{ %s}")
                for words in (
                    *("dozen", "thousandths", "billionths", "tenths", "squared", "factorial", "half", "point five"),
                    *("times ten", "and a half", "divided by four", "to the power of three", "negative", "and thirty"),
                    *("but maybe six", "out of 36", "over three", "twentieths"),
                )
            ],
            ("100", r"10\,^\circ\mathrm{C}"),
            (r"9.8\,\frac{\text{m}}{\text{s}^2}", r"9.8\,\frac{\text{m}}{\text{s}}"),
            (r"2 M_\odot", r"2 L_\odot"),
            *[(r"5\text{ m}", r"5\text{ m}^{-1}"), (r"25^\circ C", r"25^\circ F"), (r"5\text{ k}\Omega", r"5\,\Omega")],
        ],
    ),
    "degrees": (
        [
            ("45", r"45^\circ"),
            (r"45^{\circ}", "45 degrees"),
            ("90\u00b0", "90"),
            (r"60^\circ", r"60\degree"),
            (r"\frac{1}{2}", r"\sin 30^\circ"),
        ],
        [
            (r"45^\circ", r"46^\circ"),
            ("45", r"54^\circ"),
            (r"90^\circ", r"9^\circ"),
            (r"30^\circ", r"-30^\circ"),
            (r"\frac{1}{2}", r"\cos 30^\circ"),
        ],
    ),
    "thousands": (
        [
            ("1234", "1,234"),
            ("1,234", "1234"),
            ("1234567", r"1{,}234{,}567"),
            ("12345", r"12\,345"),
            ("10080", r"10,\!080"),
            ("1000.5", "1,000.5"),
            *[(r"12000\pi", r"12{,}000\pi"), ("12000", r"12,000 \text{ km}"), ("12000", "x = 12,000")],
        ],
        [
            ("1234", "1,23"),
            ("1234", "12,34"),
            ("1234", "1.234"),
            ("1234567", "1234,567"),
            ("123456", "1,234,56"),
            ("123", ",123"),
        ],
    ),
    "mixed numbers": (
        [
            ("3/2", r"1\frac{1}{2}"),
            (r"2\frac34", "2.75"),
            ("-3/2", r"-1\frac{1}{2}"),
            ("7/2", "3 1/2"),
            (r"10\frac{2}{5}", "52/5"),
        ],
        [
            ("1/2", r"1\frac{1}{2}"),
            (r"-\frac{1}{2}", r"-1\frac{1}{2}"),
            (r"2\frac34", "1.5"),
            ("7/2", "3 1/3"),
            ("11/2", r"1\frac12"),
        ],
    ),
    "intervals": (
        [
            ("(1,2]", r"1 < x \leq 2"),
            (r"(5,\infty)", "x > 5"),
            (r"(5,\infty)", "5 < x"),
            (r"x \in [0,1)", "[0,1)"),
            (r"(-\infty, 3]", r"x \le 3"),
            (r"(-\infty,1)\cup(3,\infty)", r"x<1 \text{ or } x>3"),
            (r"\left[\frac12, 2\right]", "[0.5,2]"),
            ("(1,2)", "2 > x > 1"),
            (r"\mathbb{R}", r"(-\infty,\infty)"),
            (r"\{x \mid x > 2\}", "x>2"),
            (r"[1,2]\cup[5,6]", r"[5,6]\cup[1,2]"),
            *[
                (r"(-\infty,0)\cup(0,\infty)", same)
                for same in (r"x \neq 0", r"\mathbb{R} \setminus \{0\}", r"x \notin \{0\}")
            ],
            *[
                (r"\{x \in \mathbb{R} : x \ne \pm 1\}", same)
                for same in (r"\mathbb{R} - \{1,-1\}", r"x \ne 1, x \ne -1")
            ],
            *[("[1,5]", same) for same in (r"[1,3]\cup[2,5]", r"x \geq 1, x \leq 5", r"[1;5]")],
            *[("(1,3)", f"x>1 {sign} x<3") for sign in ("and", r"\text{ and }", r"\land", r"\wedge")],
            *[(r"(-\infty,1)\cup(3,\infty)", f"x<1 {sign} x>3") for sign in ("or", r"\lor", r"\vee", "\u2228")],
            (r"\mathbb{R}", r"x>1 \text{ or } x<3"),
            (r"\{x \mid x<1 \text{ or } x>3\}", "x>3 or x<1"),
            *[("(-3,3)", "|x| < 3"), ("(-3,3]", "]-3,3]"), (r"x \neq \sqrt{2}", r"\mathbb{R}\setminus\{\sqrt2\}")],
        ],
        [
            ("(1,2]", "[1,2]"),
            ("(1,2)", "[1,2]"),
            (r"(5,\infty)", "x \\geq 5"),
            (r"(5,\infty)", "x < 5"),
            ("[0,1)", "(0,1]"),
            (r"x \in (1,2)", r"y \in (1,2)"),
            (r"(-\infty,1)\cup(3,\infty)", "1<x<3"),
            ("[1,2]", "[2,1]"),
            *[("(1,3)", f"x>1 {sign} x<3") for sign in ("or", r"\text{ or }", r"\lor", r"\vee")],
            *[
                (r"(-\infty,1)\cup(3,\infty)", f"x<1 {sign} x>3")
                for sign in ("and", r"\text{ and }", r"\land", r"\wedge")
            ],
            *[("x>1, x<3", "x>1 or x<3"), ("x>1 and x<3", "x>1 or x<3"), ("(1,3)", r"\{x : x>1 \text{ or } x<3\}")],
            (r"(-\infty,-\sqrt2)\cup(\sqrt2,\infty)", r"x<-\sqrt2 and x>\sqrt2"),
            (r"[1,2]\cup[5,6]", "[1,2]"),
            ("(1,2)", "(1,3)"),
            *[("1<x<3", "1,3"), (r"x \in (1,3)", "1,3"), (r"x \neq 0", r"\mathbb{R}"), (r"x \neq 0", "y \\neq 0")],
            *[("x>1, x<3", r"\mathbb{R}"), (r"\mathbb{R}\setminus\{0\}", "0"), (r"[1,3]\cup(3,5]", r"[1,3)\cup(3,5]")],
        ],
    ),
    "sets and lists": (
        [
            (r"\{1,2,3\}", r"\{3,1,2\}"),
            ("1,2,3", "3, 2, 1"),
            (r"2 \text{ and } 3", "3,2"),
            (r"\{1,2\}", "1,2"),
            (r"\emptyset", r"\{\}"),
            ("x=2 \\text{ or } x=3", "3, 2"),
            (r"\{\sqrt{4}, x+1\}", r"\{1+x, 2\}"),
            (r"\{1,2\}\cup\{3\}", r"\{1,2,3\}"),
            (r"\varnothing", r"\emptyset"),
        ],
        [
            (r"\{1,2,3\}", r"\{1,2\}"),
            (r"\{1,2\}", r"\{1,2,3\}"),
            ("1,2", "1,3"),
            (r"\{1,2\}", "(1,2)"),
            ("1,1,2", "1,2,2"),
            ("12", "1, 2"),
            (r"\emptyset", "0"),
            *[("1,3", r) for r in ("[1,3]", "1<x<3", r"x \in [1,3]", r"x \in (1,3)", r"1 \leq x \leq 3", "x>1, x<3")],
            *[("58,500", "58<x<500"), (r"\pm 3", "[-3,3]"), ("x=1, x=3", "[1,3]"), (r"\sqrt2, 3", r"\sqrt2 < x < 3")],
        ],
    ),
    "tuples": (
        [
            ("(1,2,3)", "(1, 2, 3)"),
            ("(1,2)", "1,2"),
            (r"\left(\frac12, 3\right)", "(0.5,3)"),
            ("x=3,y=4", "(3,4)"),
            ("(2,3)", "(x,y)=(2,3)"),
            ("(2,3)", "x=2, y=3"),
            *[
                ("(2,3)", "y=3, x=2"),
                ("y=3, x=2", "(2,3)"),
                ("(2,3)", r"\begin{cases} y=3 \\ x=2 \end{cases}"),
                ("(5,2)", "n=5, k=2"),
                ("(1,2)", "x_2=2, x_{1}=1"),
            ],
            *[("2,3", "y=3, x=2"), ("(2,3)", r"\langle 2,3\rangle"), ("(1,2,3)", "z=3, x=1, y=2")],
            ("(1,2),(3,4)", "(3,4),(1,2)"),
            (r"(3, \frac{\pi}{2})", r"\left( 3, \pi/2 \right)"),
        ],
        [
            ("(1,2,3)", "(3,2,1)"),
            ("(1,2)", "(2,1)"),
            ("(1,2)", "(1,2,3)"),
            ("x=3,y=4", "(4,3)"),
            ("x=3,y=4", "x=4,y=3"),
            *[("(2,1)", "y=2, x=1"), ("(2,1)", "(y=2, x=1)"), ("y=2, x=1", "(2,1)"), ("(3,2,1)", "z=3, y=2, x=1")],
            ("(1,2),(3,4)", "(1,4),(3,2)"),
            (r"(3, \frac{\pi}{2})", r"(3, \pi)"),
        ],
    ),
    "matrices": (
        [
            (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1 & 2 \\ 3 & 4\end{bmatrix}"),
            (r"\begin{pmatrix}1/2\\x+1\end{pmatrix}", r"\begin{pmatrix}0.5\\1+x\end{pmatrix}"),
            (r"\begin{bmatrix}1&2\end{bmatrix}", r"\left[\begin{array}{cc}1 & 2\end{array}\right]"),
            (r"\begin{pmatrix}\sqrt{4}\\3\end{pmatrix}", r"\begin{pmatrix}2\\3\end{pmatrix}"),
            (r"A = \begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
            (r"\begin{pmatrix}1/2\\x/2\end{pmatrix}", r"\frac{1}{2}\begin{pmatrix}1\\x\end{pmatrix}"),
            (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\[4pt]2\end{pmatrix}"),
        ],
        [
            (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
            (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
            (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
            (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\\0\end{pmatrix}"),
            (r"\begin{pmatrix}x+1\\2\end{pmatrix}", r"\begin{pmatrix}x-1\\2\end{pmatrix}"),
            (r"\begin{pmatrix}1/2\\x/2\end{pmatrix}", r"\frac{1}{3}\begin{pmatrix}1\\x\end{pmatrix}"),
        ],
    ),
    "complex numbers": (
        [
            ("3+4i", "4i+3"),
            (r"e^{i\pi}", "-1"),
            ("x^2+1", "(x+i)(x-i)"),
            ("1+i", r"\sqrt{2}e^{i\pi/4}"),
            (r"\sqrt{-1}", "i"),
            ("-i", r"\frac{1}{i}"),
            ("5", "(1+2i)(1-2i)"),
        ],
        [
            ("3+4i", "3-4i"),
            ("i", "-i"),
            ("1", "i^2"),
            ("3+4i", "5"),
            ("x^2-1", "(x+i)(x-i)"),
            ("2i", "2"),
            ("6-5i", "5-6i"),
        ],
    ),
    "words": (
        [
            (r"\text{Evelyn}", "evelyn"),
            (r"\text{no solution}", "No Solution"),
            *[("6,7", r"\text{6 and 7}"), ("1,2", r"\text{1, 2}"), ("20", r"\approx 20")],
            *[("18", "Answer: 18"), ("18", r"\text{The answer is } 18"), ("1/2", "1/2 or 0.5")],
            ("even", r"\text{Even}"),
            (r"\text{all real numbers}", r"\mathbb{R}"),
            ("Monday", r"\textbf{MONDAY}."),
            ("Yes", "yes"),
            ("Monday", "MONDAY"),
            ("New  York", "new york"),
            ("gr\u00f6\u00dfer", "GR\u00d6SSER"),
        ],
        [
            ("even", "odd"),
            (r"\text{Evelyn}", "Eve"),
            ("yes", "no"),
            ("ab", "aab"),
            ("Monday", "Mon day"),
            (r"\text{no solution}", "solution"),
            ("5", "five"),
            ("0", "none"),
        ],
    ),
    "multiple choice": (
        [
            ("C", "(C)"),
            ("(C)", "C"),
            ("C", r"\text{(C)}"),
            ("C", "(C) 42"),
            ("(C) 42", "C"),
            ("B", r"\textbf{(B)}\ 12"),
            ("(A)", "(a)"),
            ("D", "D. none"),
            *[("C", "Option C"), ("C", r"\text{Choice (C)}"), ("C", "c"), ("C", "(C) 3 and 4"), ("C", "C. (x) or (y)")],
        ],
        [
            *[
                ("C", hedged)
                for hedged in ("(C) or (D)", "(C), (D)", "(C)(D)", "C. or D.", "(C) 42 or (D) 43", "C or D")
            ],
            *[("A", "A) B) C) D)"), ("(C)", "(C) or (D)"), ("C", "(c) or (d)"), ("C", "Option D"), ("c", "C or D")],
            *[("C", "D"), ("C", "(D) C"), ("A", "B"), ("(A)", "(B)"), ("B", "AB"), ("C", "42")],
        ],
    ),
    "dates and times": (
        [
            *[("2023-05-01", date) for date in ("2023-5-1", "May 1, 2023", r"\text{1 May 2023}", "May 1st 2023")],
            *[("10:30 a.m.", "10:30 AM"), (r"10:30\text{ AM}", "10:30 a.m."), ("9:05", "09:05"), ("20:34", "20:34:00")],
            *[("3:4", "3/4"), ("5:12", r"\frac{5}{12}")],
        ],
        [
            *[("2023-05-01", other) for other in ("2017", "2016+1", "2023-05-02", "May 2, 2023")],
            *[("2017", "2023-05-01"), ("12:30", "0.4"), ("12:30", "2/5"), ("0.4", "12:30"), ("10:30 am", "10:30 pm")],
            *[("5/1/2023", "5/2023"), ("2023/05/01", "404.6")],
        ],
    ),
    "numbers in a text font": (
        [
            ("540", r"\textbf{(540)}"),
            ("540", r"\mathbf{(540)}"),
            ("540", r"\text{( 540 ).}"),
            (r"\textbf{(540)}", "540"),
            ("-3", r"\textbf{(-3)}"),
            ("1/2", r"\mathrm{(1/2)}"),
            ("540", r"\textbf{\underline{(540)}}"),
            ("(1,2)", r"\textbf{(1, 2)}"),
            ("(0,5]", r"\text{(0, 5]}"),
        ],
        [
            ("540", r"\textbf{(541)}"),
            ("(1,2)", r"\textbf{(2,1)}"),
            ("(0,5]", r"\text{(0,5)}"),
            ("12", r"\textbf{(1,2)}"),
            ("15", r"5\text{(3)}"),
            ("540", r"\textbf{(C) 540}"),
            ("540", r"\textbf{(C)}"),
            ("540", r"\text{(540 apples) 7}"),
        ],
    ),
    "roots and powers": (
        [
            (r"2\sqrt{3}", r"\sqrt{12}"),
            (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt{3}}"),
            ("1024", "2^{10}"),
            (r"\sqrt[3]{8}", "2"),
            (r"\sqrt{50}", "5\u221a2"),
            (r"\frac{1+\sqrt5}{2}", r"\frac12 + \frac{\sqrt{5}}{2}"),
            (r"\binom{5}{2}", "10"),
            (r"{5 \choose 2}", "10"),
            ("3^{-2}", "1/9"),
            ("120", "5!"),
            ("10000!", r"10000 \cdot 9999!"),
        ],
        [
            (r"2\sqrt{3}", r"3\sqrt{2}"),
            (r"\sqrt{12}", r"\sqrt{13}"),
            ("1024", "2^{11}"),
            (r"\sqrt{2}", "2"),
            ("2^{10}", "20"),
            (r"\frac{1+\sqrt5}{2}", r"\frac{1-\sqrt5}{2}"),
            ("5!", "121"),
            (r"\pi", "3.14"),
            (r"\pi", "22/7"),
            ("120", "5!!"),
        ],
    ),
    "plus or minus": (
        [
            (r"1\pm\sqrt{5}", r"1+\sqrt5, 1-\sqrt5"),
            (r"\pm 3", "3, -3"),
            (r"x = 5 \pm 3", "2, 8"),
            (r"\pm\frac12", "-0.5, 0.5"),
            (r"2 \pm i", "2-i, 2+i"),
        ],
        [
            (r"1\pm\sqrt{5}", r"1+\sqrt5"),
            (r"\pm 3", "3"),
            (r"5 \pm 3", "3, 8"),
            (r"\pm\frac12", "-0.5, 0.25"),
            (r"2 \pm i", r"2 \pm 2i"),
        ],
    ),
    "expressions": (
        [
            ("(x+1)^2", "x^2+2x+1"),
            ("a+b", "b+a"),
            ("ab", "ba"),
            ("ab", r"a \cdot b"),
            ("5xy", "5 xy"),
            (r"\frac{x^2-1}{x-1}", "x+1"),
            (r"x^a x^b", "x^{a+b}"),
            (r"\ln(2x)", r"\ln 2 + \ln x"),
            (r"\frac{n(n+1)}{2}", r"\sum_{k=1}^n k"),
            (r"\tan x", r"\frac{\sin x}{\cos x}"),
            ("y=2x+3", "2x+3"),
            ("f(x)=2x", "2x"),
            (r"\frac{a}{b}+c", "c+a/b"),
            (r"\pi r^2", r"r^2 \pi"),
            ("|x|", r"\sqrt{x^2}"),
            (r"\sin^2 x+\cos^2 x", "1"),
            (r"\frac{6}{x}", r"\frac{(2)(3)}{x}"),
            ("x+6", "2(3)+x"),
            (r"x+\frac{7}{3}", r"2\frac{1}{3}+x"),
        ],
        [
            ("(x+1)^2", "x^2+1"),
            ("a+b", "a-b"),
            ("x", "y"),
            ("R", "r"),
            ("R+r", "2r"),
            ("2x+3", "2x+4"),
            ("a_1", "a_2"),
            ("x^2", "2x"),
            (r"\ln(2x)", r"2 \ln x"),
            (r"\frac{a}{b}", r"\frac{b}{a}"),
            (r"\sin x", r"\cos x"),
            ("f(x)=2x", "f(x)=3x"),
            (r"\frac{5}{x}", r"\frac{2(3)}{x}"),
            ("x+5", "(2)(3)+x"),
        ],
    ),
    "equations": (
        [
            ("x=5", "5"),
            ("5", "x = 5"),
            ("2x+3y=6", "4x+6y=12"),
            ("x^2+y^2=1", "y^2+x^2-1=0"),
            ("y=2x+3", "y-2x=3"),
            ("7", "2+5=7"),
            (r"x = \infty", r"\infty"),
            *[("6", f"{name}=6") for name in (r"\bar{x}", r"\hat{y}", "x^*", "x^{*}", r"\|v\|", "f^{-1}(2)")],
            *[("6", sixth) for sixth in (r"\textcolor{red}{6}", r"\color{red}6", r"\large 6", r"6\checkmark")],
        ],
        [
            ("x=5", "x=6"),
            ("x=5", "y=5"),
            ("2x+3y=6", "2x+3y=7"),
            ("x^2+y^2=1", "x^2-y^2=1"),
            ("y=2x+3", "y=3x+2"),
            ("x+y=5", "5"),
            *[("6", "x^2=6"), ("6", "x^{-1}=6"), (r"\bar{z}", "z"), ("6", r"\textcolor{red}{5}")],
        ],
    ),
    "inequalities": (
        [
            ("x>5", "5<x"),
            ("x>5", "x-5>0"),
            ("x+y>2", "2<y+x"),
            (r"x \neq 1", r"1 \neq x"),
            (r"x \geq 2", "x >= 2"),
            ("2x<6", "x<3"),
        ],
        [
            ("x>5", "x<5"),
            ("x>5", "x>=5"),
            ("x+y>2", "x+y<2"),
            (r"x \neq 1", "x=1"),
            (r"x \geq 2", "2"),
            ("x>5", "y>5"),
            ("-x>3", "x>-3"),
        ],
    ),
    "bases": (
        [("1010_2", "1010"), ("1010_2", "1010_{2}"), ("2A_{16}", "2A_{16}"), ("133_5", "133_{5}"), ("12_3", "12_3")],
        [("1010_2", "1011_2"), ("1010_2", "10"), ("133_5", "133_6"), ("1010_2", "101_2"), ("12_3", "21_3")],
    ),
}


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

r"""LaTeX and plain text of an answer in one spelling, so that what looks alike is alike.

answer as written -> tidy answer

``\dfrac12``, ``\frac{1}{2}`` and ``\tfrac 1 2`` become ``\frac{1}{2}``; spacing, delimiters, currency and degree signs
go; ``\text{ cm}`` becomes ``⟦cm⟧``, which distinguishes text from variables; ``\textbf{(540)}`` alone is ``(540)``.
Nothing is evaluated. The time is linear in the length of the answer, whatever it is.
"""

import functools
import re
from collections.abc import Callable

TEXT_START, TEXT_END = "\u27e6", "\u27e7"
_MEANT = {  # sign of typography, or several -> LaTeX
    "\u2212\u2013\u2010\u2011": "-",
    "\u00d7\u00b7\u22c5\u2217": r"\cdot ",
    "\u00f7\u2215": "/",
    "\u00a0\u2009\u202f": " ",
    f"\u20ac\u00a3\u00a5\u20b9{TEXT_START}{TEXT_END}": "",
    "\u03bc\u00b5": r"\mu ",
    "\u03a9\u2126": r"\Omega ",
    **{"\u03c0": r"\pi ", "\u221e": r"\infty ", "\u221a": r"\sqrt ", "\u00b0": r"\circ ", "\u00b1": r"\pm "},
    **{"\u00a2": r"\text{ cents}", "\u00c5\u212b": r"\AA ", "\u2227": r"\land ", "\u2228": r"\lor "},
    **{"\u2264": r"\leq ", "\u2265": r"\geq ", "\u2260": r"\neq ", "\u2248": r"\approx "},
    **{"\u2208": r"\in ", "\u222a": r"\cup ", "\u00b2": "^{2}", "\u00b3": "^{3}"},
    **{"\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}"},
    **{"\uff0c": ",", "\uff1a": ":", "\uff08": "(", "\uff09": ")", "\uff05": "%"},
}
_UNICODE = str.maketrans({sign: meant for signs, meant in _MEANT.items() for sign in signs})
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z{}%$])")
_SPACES = re.compile(r"\s+")
_DEGREES = r"\s*(?:\^\s*\{?\s*)?\\(?:circ|degrees?)(?![a-zA-Z])\s*\}?\s*"
_Replacement = str | Callable[[re.Match[str]], str]
# (pattern, replacement) in order; each stands once. Runs of spaces are single spaces before.
_SPELLING: list[tuple[re.Pattern[str], _Replacement]] = [
    (
        re.compile(
            rf"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{{?\d\}}?)?)\s*([({{])?\s*(\d+(?:\.\d+)?){_DEGREES}(?(2)[)}}])"
        ),
        r"\1(\\frac{\3\\pi}{180})",
    ),
    (re.compile(r"\\left\s*\.|\\right\s*\."), ""),
    (
        re.compile(
            r"\\(?:(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|mathstrut|checkmark|Large|LARGE|large"
            r"|huge|Huge|small)(?![a-zA-Z])|(?:text)?color\s*\{[^{}]*\})"
        ),
        "",
    ),
    (re.compile(r"\\bar(?=\s*\{\d+\})"), r"\\overline"),
    (re.compile(r"\.(\d{0,20}?)(\d)\2{2,20}\s*(?:\\[ld]?dots(?![a-zA-Z])|\.\.\.|\u2026)"), r".\1\\overline{\2}"),
    (re.compile(r"\\([lr])angle(?![a-zA-Z])"), lambda m: "(" if m[1] == "l" else ")"),
    (re.compile(r"\{([^{}\\]*)\\choose(?![a-zA-Z])([^{}\\]*)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\b([ap])\. ?m\b\.?", re.IGNORECASE), r"\1m"),
    (re.compile(rf"^\s*{TEXT_START}?(?:USD|EUR|GBP|INR)\s*{TEXT_END}?\s*(?=[\d.])"), ""),
    (re.compile(r"\\\$|\$|\\\(|\\\)|(?<!\\)\\\[|(?<!\\)\\\]"), ""),
    (re.compile(r"\s*\{\s*,\s*\}\s*"), ","),
    (re.compile(r",\s*\\!\s*"), ","),  # 10,\!080
    (re.compile(r"(?<=\d)\s*\\[,;:!]\s*(?=\d{3}(?!\d))"), ""),  # 12\,345
    (re.compile(r"(?<!\\)\\[!,;:> ]|~|\\q?quad(?![a-zA-Z])|\\hspace\{[^{}]*\}"), " "),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])|\\circ(?![a-zA-Z])|\\degrees?(?![a-zA-Z])"), ""),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\le(?:q|qslant)?(?![a-zA-Z])|<=|=<"), r"\\leq "),
    (re.compile(r"\\ge(?:q|qslant)?(?![a-zA-Z])|>="), r"\\geq "),
    (re.compile(r"\\neq?(?![a-zA-Z])|!=|\\not\s*=|\\not(?:\s*\\)?in(?![a-zA-Z])"), r"\\neq "),
    (re.compile(r"\\(?:backslash|smallsetminus)(?![a-zA-Z])"), r"\\setminus "),
    (re.compile(r"\\log\s*_\s*(?:e(?![a-zA-Z])|\{\s*e\s*\})"), r"\\ln "),
    (re.compile(r"\](\s*[^\[\](),;\s][^\[\](),;]*[,;][^\[\](),;]+)(?=[\[\]])"), r"(\1"),  # ]1,2] is (1,2]
    (re.compile(r"(?<=[\[(])([^\[\](),;]+[,;][^\[\](),;]+)\["), r"\1)"),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    (re.compile(r"\\(?:times|cdot|ast)(?![a-zA-Z])|(?<!\*)\*(?!\*)"), r"\\cdot "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
    (re.compile(r"\\(?:lbrace|\{)"), r"\\{"),
    (re.compile(r"\\(?:rbrace|\})"), r"\\}"),
    (re.compile(r"\\(?:approx|simeq|thickapprox)(?![a-zA-Z])"), r"\\approx "),
    (re.compile(r"(?<![a-zA-Z])(?:np|numpy|math)\.(?=[a-z])"), ""),
    (
        re.compile(r"(?<![\\a-zA-Z])(pi|infty|infinity|inf)(?![a-zA-Z])"),
        lambda m: r"\pi " if m[1] == "pi" else r"\infty ",
    ),
    (re.compile(r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\mathbb\s*\{?\s*R(?![a-zA-Z])\s*\}?|\\R(?![a-zA-Z])"), r"(-\\infty,\\infty)"),
    (re.compile(r"(?<=\\infty\))\s*[-\\]\s*(?=\\\{)"), r"\\setminus "),
    (
        re.compile(r"(?<![\\a-zA-Z])(arc(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt)(?=\s*[({^\\])"),
        r"\\\1",
    ),
]
_PLAIN_FONT = re.compile(
    r"\\(?:mathbf|mathit|mathcal|underline|boldsymbol|bm|vec|overrightarrow|operatorname\*?|mathbb(?!\s*\{R\}))\s*\{([^{}]*)\}"
)
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|mbox|mathrm|textnormal|hbox|mathsf|rm|unit|si)\s*"
    r"\{((?:[^{}]|(?<=[a-zA-Z]\^)\{-?\d\})*)\}"
)
_FONT_SWITCH = re.compile(r"\{\s*\\(?:rm|bf|it)(?![a-zA-Z])([^{}\\]*)\}")
# A letter in a text font is a unit behind a value that ends, within this many characters, as one does.
_VALUE = re.compile(r"(?=.*(?:\d|\\pi|\\sqrt|\\frac)).*?(?:[\d)}%]|\\cdot|\\mu|/|[ ~]|\\[,;:! ])\s*")
_NEAR = 40
# A whole answer in a text font, or its end: "12 m", "3 m and" (4 m).
_VALUE_AND_UNIT = re.compile(r"([-+]?[\d.,]*\d) ([a-zA-Z]+(?:[/^\d][a-zA-Z/^\d]*)?)")
_WORDS_AND = re.compile(r"(\w.*?),? (and|or)")
_TEMPERATURE = re.compile(
    rf"(?<=\d)(?:\s|~|\\[,;:! ]|\{{\}})*(?:\\(?:text|mathrm)\s*\{{[\s~]*)?{_DEGREES}"
    r"(?:\\(?:text|mathrm)\s*\{[\s~]*)?([CF])(?![a-zA-Z])\s*\}?"
)
_TEXT_UNITS = r"((?:\\(?:text|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?(?:\s|\\cdot|\\,)*)+)"
# Units in the one form that is read on: "9.8 \text{m}/\text{s}^2".
_UNITS: list[tuple[re.Pattern[str], _Replacement]] = [
    (
        re.compile(rf"(?<=[\d}}])(?:\s|~|\\[,;:! ])*\\[dt]?frac\s*\{{\s*{_TEXT_UNITS}\}}\s*\{{\s*{_TEXT_UNITS}\}}"),
        r" \1/\2",
    ),
    (re.compile(rf"/\s*\(\s*{_TEXT_UNITS}\)"), r"/\1"),
    (
        re.compile(r"(?<=[\d}])[\s~\\,;:!]*(?:\\mathrm\{\s*)?\b([MLR])\}?\s*_\s*\{?\s*\\odot\}?(?=[\s$.]*$)"),
        r" \\text{solar \1}",
    ),
    (re.compile(r"\\AA(?![a-zA-Z])"), r" \\text{angstrom}"),
    (re.compile(r"\\num\s*\{([^{}]*)\}"), r"\1"),
    (
        re.compile(r"\\(?:qty|SI)\s*\{([^{}]*)\}\s*\{([^{}]*)\}"),
        lambda m: rf"{m[1]}\text{{ " + m[2].replace("\\", " ") + "}",
    ),
]
_NUMBER = re.compile(r"[-+]?[\d.,/]+%?(?: ?[,;]?(?: and| or)? [-+]?[\d.,/]+%?)*")
# A whole answer in a text font: numbers, signs and what separates numbers, in brackets. No letter: (C) is a choice.
_WHOLE_IN_BRACKETS = re.compile(rf"{TEXT_START}\s*([(\[](?=[^\d]*\d)[-+\d.,:;/% ()\[\]]*[)\]])[ .]*{TEXT_END}[ .]*")
_LABEL = re.compile(
    r"\s*(\\(?:text(?:bf)?|mathrm)\s*\{\s*)?(?:the )?(?:final |correct )?(?:answer|result|solution|value|total)"
    r"(?:\s*:|(?: is)(?![a-zA-Z]):?)\s*(\})?",
    re.IGNORECASE,
)
_DEGREES_AS_WORD = re.compile(r"\s?(?<![a-zA-Z])(?:degrees?|deg)(?![a-zA-Z])", re.IGNORECASE)
_PERCENT_AS_WORD = re.compile(
    r"\s?\u27e6?\s?(?<![a-zA-Z])(?:percent(?:age)?|pct)(?![a-zA-Z])\.?\s?\u27e7?", re.IGNORECASE
)
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_POWER_OF_TEN_AS_WORD = re.compile(rf"(?<=\d)\s?(\u27e6?)\s?({'|'.join(_POWERS_OF_TEN)})(?![a-zA-Z])", re.IGNORECASE)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAY = r"(\d\d?)(?:st|nd|rd|th)?"
_DATE = re.compile(rf"(?:{_DAY} (?:of )?)?({'|'.join(_MONTHS)})[a-z]*\.?(?: {_DAY})?,? ?(\d{{4}})", re.IGNORECASE)
_ALL_REALS = re.compile(r"\u27e6?(?:all )?(?:the )?(?:reals|real numbers)\u27e7?", re.IGNORECASE)
_COMMAND_WITH_ARGUMENTS = re.compile(r"\\(frac|sqrt|binom)(?![a-zA-Z])")
_COMMAND = re.compile(r"\\[a-zA-Z]+|\\.", re.DOTALL)
_BRACKET = re.compile(r"\\.|[{}()]", re.DOTALL)
# A text whose signs grow to more than this many times its length is not an answer.
_MOST_GROWTH, _LONGEST_SIGN = 3, 100
# A space has a meaning only between two letters or digits; after a command it ends the command's name.
_IDLE_SPACE = re.compile(r"(?<![a-zA-Z0-9])\s+|\s+(?![a-zA-Z0-9])")


@functools.lru_cache(maxsize=2048)
def tidy(answer: str) -> str:
    """The answer in the one spelling; text that is not LaTeX keeps its words."""
    text = _SPACES.sub(" ", answer.translate(_UNICODE))
    if len(text) > _MOST_GROWTH * len(answer) + _LONGEST_SIGN:
        return answer.strip()
    if label := _LABEL.match(text):
        text = (label[1] if label[1] and not label[2] else "") + text[label.end() :]
    if "\\" in text:
        if "\\begin" not in text:
            text = _DOUBLED.sub(r"\\", text)
        text = _FONT_SWITCH.sub(r"\\text{\1}", _PLAIN_FONT.sub(r"\1", text))
        text = _TEMPERATURE.sub(r"\\text{degree \1}", text)
        for pattern, replacement in _UNITS:
            text = pattern.sub(replacement, text)
        text = _TEXT.sub(_as_text, text)
    for pattern, replacement in _SPELLING:
        text = pattern.sub(replacement, text)
    if whole := _WHOLE_IN_BRACKETS.fullmatch(text.strip()):
        text = whole[1]
    text = _DEGREES_AS_WORD.sub("", text).replace(f"{TEXT_START}{TEXT_END}", "")
    text = _PERCENT_AS_WORD.sub("%", text)
    text = _POWER_OF_TEN_AS_WORD.sub(lambda m: rf"\cdot 10^{{{_POWERS_OF_TEN[m[2].lower()]}}}{m[1]}", text)
    text = _with_braces(text.replace(f"{TEXT_START}{TEXT_END}", ""))
    text = _SPACES.sub(" ", text).strip().rstrip(",;: ").lstrip(";: ")
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    text = text.removeprefix("=").removeprefix("\\approx").strip()
    date = _DATE.fullmatch(text.strip(TEXT_START + TEXT_END))
    if date and (day := date[1] or date[3]):  # May 1, 2023 and 1 May 2023 are 2023-5-1
        return f"{date[4]}-{_MONTHS.index(date[2].lower()) + 1}-{day}"
    return r"(-\infty,\infty)" if _ALL_REALS.fullmatch(text) else text


@functools.lru_cache(maxsize=4096)
def compact(tidy_text: str) -> str:
    """A tidy answer without meaningless spaces: two answers that agree here are the same letter for letter."""
    return _IDLE_SPACE.sub("", tidy_text)


def _as_text(match: re.Match[str]) -> str:
    content = " ".join(match[1].replace("~", " ").split())
    if _NUMBER.fullmatch(content):
        return content
    if len(content) == 1 and content.isalnum():
        # Behind a value a single letter is a unit, but for some that are numbers or variables there too.
        before = match.string[max(0, match.start() - _NEAR) : match.start()] + match[1][0].strip(content)
        if (content in "einxyz" and match[1][0] != "~") or not _VALUE.fullmatch(before):
            return content
    if parts := _VALUE_AND_UNIT.fullmatch(content):
        return f"{parts[1]}{TEXT_START}{parts[2]}{TEXT_END}"
    if parts := _WORDS_AND.fullmatch(content):
        return f"{TEXT_START}{parts[1]}{TEXT_END}{TEXT_START}{parts[2]}{TEXT_END}"
    return f"{TEXT_START}{content}{TEXT_END}"


def _with_braces(text: str) -> str:
    r"""The text with braces around every argument of ``\frac``, ``\sqrt`` and ``\binom``; ``\sqrt(3)`` too."""
    commands = list(_COMMAND_WITH_ARGUMENTS.finditer(text))
    if not commands:
        return text
    closing = _closing_brackets(text)
    ends: dict[int, int] = {}
    edits: list[tuple[int, int, str]] = []
    for command in reversed(commands):  # what stands in an argument is known before the command itself
        position = command.end()
        if command[1] == "sqrt" and text.startswith("[", position):
            position = text.find("]", position) + 1 or len(text)
        for _ in range(1 if command[1] == "sqrt" else 2):
            start = position
            while text.startswith(" ", start):
                start += 1
            end = _end_of_argument(text, start, closing, ends, parenthesised=command[1] == "sqrt")
            if end is None:
                break
            edits.append((position, start, ""))
            if text[start] != "{":
                width = 1 if text[start] == "(" else 0  # of brackets that braces replace
                edits += [(start, start + width, "{"), (end - width, end, "}")]
            position = end
        ends[command.start()] = position
    out, last = [], 0
    # Where several meet, one argument's brace closes before the next one's opens.
    for start, behind, new in sorted(edits, key=lambda edit: (edit[0], edit[2] != "}", edit[1])):
        if start >= last:
            out += [text[last:start], new]
            last = behind
    return "".join(out) + text[last:]


def _end_of_argument(
    text: str, start: int, closing: dict[int, int], ends: dict[int, int], *, parenthesised: bool
) -> int | None:
    """Where the argument that begins at ``start`` ends; None if it is absent."""
    first = text[start : start + 1]
    if first == "{" or (first == "(" and parenthesised):
        return closing.get(start)
    if first in ("", "}"):
        return None
    if first != "\\":
        return start + 1
    command = _COMMAND.match(text, start)
    return ends.get(start, command.end() if command else None)


def _closing_brackets(text: str) -> dict[int, int]:
    """The index behind the partner of every brace and parenthesis that has one."""
    closing: dict[int, int] = {}
    opened: dict[str, list[int]] = {"{": [], "(": []}
    for bracket in _BRACKET.finditer(text):
        sign = bracket[0]
        if sign in opened:
            opened[sign].append(bracket.start())
        elif sign in ("}", ")") and opened["{" if sign == "}" else "("]:
            closing[opened["{" if sign == "}" else "("].pop()] = bracket.end()
    return closing

r"""Words in answers: "no solution", names, the letter of a multiple choice, and the unit of a value.

tidy answer -> words in one spelling; tidy scalar -> value, unit (which are not converted: 60 min is not 1 h)

Numbers are compared in ``arithmetic.py``.
"""

import functools
import re
from collections import Counter

from perl.rewards.verifier.latex import TEXT_END, TEXT_START

_WORD = re.compile(r"[^\W\d_]{2,}")
_NO_WORDS = re.compile(r"\\[a-zA-Z]+|[\d^_=+*/<>{}|\\-]")
_TEXT = re.compile(rf"{TEXT_START}[^{TEXT_END}]*{TEXT_END}")
_FEW_LETTERS = re.compile(r"[a-zA-Z]{2,3}")
_CHOICE = re.compile(r"(?:(?:option|choice) )?\(?([A-J])(?:\)|[.:](?!\d)|$)", re.IGNORECASE)
# Behind the letter of a choice: another one, as in "(C) or (D)" and "C. 42, D. 43".
_HEDGED = re.compile(
    r"(?:\s|or|and|[,;/&])*\(?[A-J](?:[).:]|$)|(?!.*?\bboth\b).*?(?:\bor|\band|[,;/])\s*\(?[A-J][).:]", re.IGNORECASE
)
_WORDS = (
    r"(?: [^\W\d_]{2,}| ?[\u4e00-\u9fff]+| m/s|(?:cm|mm|km|kg|mg|ml|mph|kph|lbs|hrs)(?![a-zA-Z]))\.?"
    r"(?:(?: |/| / )[^\W\d_]+\.?)*"
)
_POWER = r"(?:\s?\^\{?-?\d\}?)?"
# Texts behind a value, multiplied and divided: m s^{-1}, \mu m, k\Omega. Letters in mathematics are variables.
_TEXTS = (
    rf"(?:\s?(?:(?:\\cdot|/)\s?)?(?:(?:\\mu\s?)?{TEXT_START}[^{TEXT_END}]*{TEXT_END}"
    rf"|(?:(?<=[\d{TEXT_END}])|(?<=[\d{TEXT_END}] ))\\Omega){_POWER})+"
)
_UNIT = re.compile(rf"(?:(?P<texts>{_TEXTS})|\s?(?<=[\d)}}%])(?P<words>{_WORDS}{_POWER}))\s?$")
# Words and numbers that are no unit, but say something of the value: "5 or more", "5 dozen", "5 divided by 4", "not 5".
_SAYS_MORE = re.compile(
    r"(?<![\w-])(?:or|not|than|plus|minus|times|but|maybe|perhaps|possibly|probably|negative|divided|multiplied"
    r"|(?:over|point) (?:\d|zero|one|two|three|four|five|six|seven|eight|nine|ten)"
    r"|factorial|power|doubled|tripled|halved|dozens?|half|halves|and (?:an?|some)|zero|one|two|three|ten"
    r"|eleven|twelve|(?:four|five|six|seven|eight|nine)(?:teen)?|(?:thir|fif|eigh)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|[mbtr]+illion|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth"
    r"|\w+(?:teen|tie|hundred|thousand|illion)th|hundredth|thousandth)s?"
    r"|(?<!per )(?<=\s)\d+)(?![\w-])|^\s*(?:squared|cubed)\s*$",
    re.IGNORECASE,
)
_FACTOR = re.compile(rf"(/|\bper\b)|(\\[a-zA-Z]+|[^\W\d_]+)({_POWER})")
# Letters that are no word may be variables: "5 xy". These are units.
_SHORT_UNITS = frozenset(
    "am cl cm db dl dm eV ev ft gb ghz hp hr hrs hz in kb kg khz kj kl km kmh kN kn kPa kph kW kWh kw lb lbs m/s mb mg "
    "mhz mi min ml mm mph ms nm ns oz pa pm psi pt qt rpm sec sq tb yd yds yr yrs".casefold().split()
)
_VOWEL = re.compile(r"[aeiouy\u0080-\uffff]")
_IDEOGRAM = re.compile(r"[\u4e00-\u9fff]")
_SAME_UNITS = {
    "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km",
    "millimeter": "mm", "millimetre": "mm", "inche": "in", "inch": "in", "foot": "ft", "feet": "ft", "mile": "mi",
    "hour": "h", "hr": "h", "minute": "min", "second": "s", "sec": "s", "gram": "g", "kilogram": "kg", "pound": "lb",
    "dollar": "usd", "liter": "l", "litre": "l", "yard": "yd", "year": "yr", "ounce": "oz", "kph": "km/h",
    "kmh": "km/h", "mph": "mi/h", "newton": "N", "joule": "J", "watt": "W", "volt": "V", "kelvin": "K", "ampere": "A",
    "coulomb": "C", "hertz": "hz", "pascal": "pa", "ohm": "\\Omega", "L": "l",
}  # fmt: skip
_NO_MARKS = str.maketrans({TEXT_START: " ", TEXT_END: "", ".": " "})
_POWERS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}


@functools.lru_cache(maxsize=4096)
def is_words(text: str) -> bool:
    """Whether a tidy text is words: what stands in LaTeX's text, or letters that are no variables and no functions."""
    if TEXT_START in text:
        return not _TEXT.sub("", text).strip(" .,()")
    return not _NO_WORDS.search(text) and bool(_WORD.search(text))


def normal_words(text: str) -> str:
    """Words whatever their case, spaces and closing punctuation."""
    words = " ".join(_untexted(text).casefold().split()).strip(" .,;:!")
    return words[1:-1].strip() if re.fullmatch(r"\([^()]*\)", words) else words


def is_same_product(gold: str, answer: str) -> bool:
    """Whether two or three letters may as well be variables, multiplied in another order: ab and ba."""
    return _FEW_LETTERS.fullmatch(gold) is not None and sorted(gold) == sorted(answer)


def is_choice(text: str) -> bool:
    """Whether a tidy text is the letter of a multiple choice: A, (A), A., up to J."""
    return _CHOICE.fullmatch(_untexted(text)) is not None


def different_choices(gold: str, answer: str) -> bool:
    """Whether both are letters of a multiple choice, and not the same one; a and A may be the same."""
    letters = _CHOICE.fullmatch(_untexted(gold)), _CHOICE.fullmatch(_untexted(answer))
    return bool(letters[0] and letters[1] and letters[0][1].casefold() != letters[1][1].casefold())


def chosen(gold: str, answer: str) -> list[str]:
    """The letter of a multiple-choice answer that also states what it stands for, "(C) 42", or is in brackets."""
    letter = _CHOICE.match(text := _untexted(answer)) if is_choice(gold) else None
    if letter is None or _HEDGED.match((text if letter[1].isupper() else text.swapcase())[letter.end() :]):
        return []
    return [letter[1].upper(), f"({letter[1].upper()})"]


def _untexted(text: str) -> str:
    return text.replace(TEXT_START, "").replace(TEXT_END, "").strip()


@functools.lru_cache(maxsize=4096)
def without_unit(text: str) -> tuple[str, str]:
    """A value and its unit; the unit is empty where it is absent."""
    found = _UNIT.search(text)
    if found is None or not found.start():
        return text, ""
    unit = (found["texts"] or found["words"]).translate(_NO_MARKS)
    word = unit.split()[0].split("^")[0].casefold() if found["words"] else ""
    # Letters behind a number are variables unless they are a unit or a noun.
    noun = bool(len(word) > 2 and _VOWEL.search(word)) or _IDEOGRAM.search(word)
    if (found["words"] and not (noun or word in _SHORT_UNITS)) or _SAYS_MORE.search(unit):
        return text, ""
    # As its factors in one spelling: "square feet" is "ft2", "miles per hour" and "mph" are "h-1 mi1".
    powers: Counter[str] = Counter()
    sign, stated, last = 1, 0, ""
    for divided, name, power in _FACTOR.findall(unit.replace("\\cdot", " ")):
        word = name if len(name) == 1 else name.casefold()
        if divided:
            sign = -1
        elif word in _POWERS:
            stated = _POWERS[word]
        else:
            single = word.removesuffix("s") if len(word) > 2 else word
            last, _, below = _SAME_UNITS.get(word, _SAME_UNITS.get(single, single)).partition("/")
            powers[last] += sign * (int(power.strip(" ^{}") or 1) * (stated or 1))
            powers[below] -= sign if below else 0
            stated = 0
    if last:  # "feet squared"
        powers[last] *= stated or 1
    spelled = " ".join(f"{name}{power}" for name, power in sorted(powers.items()) if power)
    return text[: found.start()].strip(), spelled

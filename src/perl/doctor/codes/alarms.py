"""Codes of alarms of a training: PRL401 and following, made of the table of rules.

Rule -> Code
"""

from perl.doctor.codes.code import Code
from perl.trainer.alarms.table import RULES, change_of


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


ALARMS: tuple[Code, ...] = tuple(
    Code(
        rule.code,
        rule.title,
        f"The alarm `{rule.name}`: {rule.fires}.",
        f"{rule.harm} The limit: {rule.why}.",
        f"{rule.example} [{rule.code}]",
        f"{_sentence(change_of(rule))} `alarms: {{stop: [{rule.name}]}}` ends a run with it.",
    )
    for rule in RULES.values()
)
ALARM_NAMES = {rule.name: rule.code for rule in RULES.values()}
"""Name of an alarm, as ``alarms.stop`` has it -> its code."""

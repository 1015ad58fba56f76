"""Codes of alarms of a training: PRL401 and following."""

from perl.doctor.codes.code import Code

ALARMS: tuple[Code, ...] = ()

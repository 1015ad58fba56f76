"""Codes of warnings: PRL301 and following."""

from perl.doctor.codes.code import Code

WARNINGS: tuple[Code, ...] = ()

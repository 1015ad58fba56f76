"""Codes of errors: PRL201 and following."""

from perl.doctor.codes.code import Code

ERRORS: tuple[Code, ...] = ()

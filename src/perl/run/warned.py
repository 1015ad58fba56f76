"""The one way in which this package warns: a line with a code at its end, which ``perl explain`` explains.

code, message -> the logger "perl"

Imports nothing that costs time.
"""

import logging

_logger = logging.getLogger("perl")


def warn(code: str, message: str, *args: object) -> None:
    """Logs a warning; its record has the code as ``record.code``, so that programs can filter.

    Args:
        code: The row of :func:`perl.doctor.codes.codes` that explains it, as ``PRL303``.
        message: With the places of ``%``; of several lines the first is the one that gets the code.
        args: What stands in these places.
    """
    first, *others = (message % args if args else message).split("\n")
    text = "\n".join([f"{first} [{code}]", *others])
    _logger.warning("%s", text, extra={"code": code}, stacklevel=2)

"""lighteval's own command line, where its own program cannot start: ``python -m perl.evaluation.lighteval custom ...``.

arguments of lighteval -> lighteval

It parses them, asks, scores and writes as always; :mod:`perl.evaluation.lighteval.mending` says what is mended first.
"""

import sys

from perl.errors import EXIT_USER_MISTAKE, MissingExtraError, PerlError, missing_extra
from perl.evaluation.lighteval.score import lighteval_installed


def main() -> None:
    """Ends the process as lighteval does; a mistake in what was named is one line."""
    try:
        if not lighteval_installed():
            missing = missing_extra("lighteval", "eval", "its command line")
            raise MissingExtraError(missing.message, hint=missing.hint)
        from lighteval.__main__ import app

        from perl.evaluation.lighteval.mending import leave_out_broken_tasks, let_xxhash_take_text

        leave_out_broken_tasks()
        let_xxhash_take_text()
        app(prog_name="lighteval")
    except PerlError as error:
        sys.stderr.write("".join(f"error: {mistake}\n" for mistake in error.mistakes))
        sys.exit(EXIT_USER_MISTAKE)


if __name__ == "__main__":
    main()

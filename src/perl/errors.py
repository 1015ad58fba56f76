"""What can go wrong, and how it is reported.

The error model, each kind handled in one place:

* **The user's mistake** (a recipe, a path, a missing package) is a :class:`PerlError`. It is raised before a model
  loads and carries every problem of the file at once; the command line prints one line a problem and exits with 2.
* **A promise that broke** (the base's weights changed, the saved adapter is not the trained one) is a
  :class:`BrokenPromiseError`. Nobody's input caused it, the result must not be used: exit 1.
* **Completions cannot be scored** (a reward function raises again and again): :class:`RewardError`, exit 1; the run can
  go on once it is fixed.
* **No rollouts** (every vLLM server is gone, or one does not do what it is asked): :class:`RolloutError`,
  exit 1; the run can go on once they are back.
* **An alarm that was asked to ends the training**: :class:`AlarmError`, exit 1, with a checkpoint.
* **A disk is full, or a file cannot be reached** (an :class:`OSError` that nobody foresaw): :class:`FileAccessError`,
  exit 1 for a full or failing disk, 2 for a place without rights or a file that is not there.
* **Another process of a run has failed**: :class:`ProcessError`, exit 1, unless its error is one of these.
* **The user stops the run** with Ctrl-C or SIGTERM: :class:`InterruptedRunError`, exit 130, the run can be resumed.
* **A result that failed** (a completion without an answer) is data with a status, :class:`perl.types.Verdict`; it is
  never an exception and never a silent 0.0.

Anything else is a defect of this package: a plain exception with its traceback, exit 1.

Each class has a code of its own, which the command line prints after the line and `perl explain` explains. A warning is
:func:`warn`, with a code too.
"""

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER_MISTAKE = 2
EXIT_INTERRUPTED = 130

LONGEST_LISTED_CHOICE = 40
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_logger = logging.getLogger("perl")


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong, where it stands and what to do about it.

    Example:
        ``Mistake("unknown key", "recipe.yaml:4: peft.rnak", "did you mean rank?")`` prints as
        ``recipe.yaml:4: peft.rnak: unknown key (did you mean rank?)``.
    """

    message: str
    where: str = ""
    hint: str = ""

    def __str__(self) -> str:
        """The problem as one line."""
        located = f"{self.where}: {self.message}" if self.where else self.message
        line = f"{located} ({self.hint})" if self.hint else located
        return visible(" ".join(line.split()))


class PerlError(Exception):
    """The user's mistake: one line a problem, no traceback, exit 2."""

    code = "PRL206"
    exit_code = EXIT_USER_MISTAKE
    already_reported = False
    """Another process of the same run tells the user; this one ends in silence."""
    origin: int | None = None
    """Rank of the process of the same run whose error this one only passes on; None: it is its own."""
    restartable = False
    """Whether the same command may succeed if it is started again."""

    def __init__(self, message: str, where: str = "", hint: str = "", others: Sequence[Mistake] = ()) -> None:
        """Says what is wrong.

        Args:
            message: The first problem.
            where: File and key, as ``recipe.yaml:4: peft.rank``.
            hint: What to do, with the nearest valid name where there is one.
            others: Further problems found in the same look.
        """
        super().__init__(message, where, hint, others)
        self.mistakes = (Mistake(message, where, hint), *others)

    def moved(self, place: Callable[[str], str]) -> "PerlError":
        """The same error with other places.

        Args:
            place: Where a mistake stands -> how its reader calls that.
        """
        first, *others = [replace(mistake, where=place(mistake.where)) for mistake in self.mistakes]
        found = type(self)(first.message, first.where, first.hint, tuple(others))
        # One error may have a code and an exit code of its own, as what has come from another process.
        found.__dict__ |= {name: value for name, value in self.__dict__.items() if name != "mistakes"}
        return found

    def __str__(self) -> str:
        """Every problem on a line of its own."""
        return "\n".join(str(problem) for problem in self.mistakes)


class RecipeError(PerlError, ValueError):
    """A recipe that cannot be read or asks for something impossible."""

    code = "PRL201"


class DataError(PerlError, ValueError):
    """A data set that is absent, empty, incomplete or overlaps with the held-out one."""

    code = "PRL202"


class ModelError(PerlError, ValueError):
    """A model that cannot be loaded, or an adapter that would train nothing of it."""

    code = "PRL203"


class RunFolderError(PerlError):
    """An output folder that is not writable, in use, or holds another recipe's run."""

    code = "PRL204"


class MissingExtraError(PerlError, ImportError):
    """An optional package that this recipe needs and that is not installed."""

    code = "PRL205"


class BrokenPromiseError(PerlError):
    """A guard found that the run is not what it says: the result must not be used."""

    code = "PRL207"
    exit_code = EXIT_FAILED


class RewardError(PerlError):
    """Completions cannot be scored: a reward function fails too often, or the verifier's processes do not start."""

    code = "PRL208"
    exit_code = EXIT_FAILED


class RolloutError(PerlError):
    """No rollouts: no server answers, or one refuses what it is asked."""

    code = "PRL210"
    exit_code = EXIT_FAILED


class AlarmError(PerlError):
    """An alarm that is named in ``alarms.stop`` has ended the training, with a checkpoint."""

    code = "PRL219"
    exit_code = EXIT_FAILED


class ProcessError(PerlError, RuntimeError):
    """Another process of this run has failed, or ended."""

    code = "PRL214"
    exit_code = EXIT_FAILED
    restartable = True


class FileAccessError(PerlError):
    """A file that cannot be written or read: a full disk, a folder without rights, a file that vanished."""

    code = "PRL213"


class InterruptedRunError(PerlError):
    """The user stopped the run; the same command resumes it."""

    code = "PRL218"
    exit_code = EXIT_INTERRUPTED


def visible(text: str) -> str:
    """A text with nothing that a terminal would obey or show otherwise than it is; line breaks and tabs stay.

    Names in files and on the Hub are anybody's: control characters, marks that turn text around and halves of
    characters are written as JSON writes them: a backslash, ``u`` and four digits.
    """
    return _OBEYED.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def first_line(error: BaseException) -> str:
    """The first line of an error's text; of one without text its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def raise_all(kind: type[PerlError], problems: Sequence[Mistake]) -> None:
    """Raises one error with all problems, or returns if there are none."""
    if problems:
        first, *others = problems
        raise kind(first.message, first.where, first.hint, tuple(others))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint for a name that does not exist: the nearest one, else the choice if it is short enough to read."""
    choice = sorted(known)
    close = difflib.get_close_matches(name, choice) or [one for one in choice if one.lower() == name.lower()]
    close.sort(key=lambda one: sorted(one) != sorted(name))  # letters that changed places come first
    if close:
        return f"did you mean {close[0]}?"
    return f"there are: {', '.join(choice)}" if 0 < len(choice) <= LONGEST_LISTED_CHOICE else ""


def missing_extra(package: str, extra: str, needed_for: str) -> Mistake:
    """The problem of an optional package that is not installed, with the command that installs it."""
    return Mistake(f"{needed_for} needs the package {package}", hint=f"pip install 'perl-rl[{extra}]'")


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
